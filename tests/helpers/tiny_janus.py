"""A tiny folder of Janus-Pro in transformers' layout, whose pictures are 4 × 4 codes, with rows that are answered in
words and in pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from tests.helpers.tiny_processors import byte_tokenizer

import transformers  # isort: skip  (after the guard of the line above)

SIDE, TOKENS, CODES = 32, 16, 24
"""Of a picture in pixels; of one in tokens; in the code book."""
SPECIAL = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "image_token": "<image_placeholder>",
    "boi_token": "<begin_of_image>",
    "eoi_token": "<end_of_image>",
}
TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- ('<|User|>:\\n' if message.role == 'user' else '<|Assistant|>:\\n') -}}
{%- if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content -%}{{- '<image_placeholder>' if part.type == 'image' else part.text -}}{%- endfor -%}
{%- endif -%}
{{- ('\\n\\n' if message.role == 'user' else eos_token) -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|Assistant|>:\\n' }}{% endif -%}
"""


def make_tiny_janus(folder: Path) -> None:
    """Write the folder: weights large enough that every part shows in the result, and a code book that is not of one
    length."""
    images = transformers.JanusImageProcessor(
        size={"height": SIDE, "width": SIDE}, min_size=4, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    tokenizer = byte_tokenizer(SPECIAL, TEMPLATE)
    processor = transformers.JanusProcessor(images, tokenizer, chat_template=TEMPLATE, num_image_tokens=TOKENS)
    text = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": len(tokenizer), "eos_token_id": 1,
        "max_position_embeddings": 512,
    }  # fmt: skip
    vision = {
        "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": SIDE, "patch_size": 8,
        "num_image_tokens": TOKENS, "projection_dim": 32, "mlp_ratio": 2.0,
    }  # fmt: skip
    codes = {
        "embed_dim": 4, "num_embeddings": CODES, "latent_channels": 32, "base_channels": 32, "num_res_blocks": 1,
        "channel_multiplier": [1, 1, 1, 1], "projection_dim": 32, "image_token_embed_dim": 32,
    }  # fmt: skip
    config = transformers.JanusConfig(
        text_config=text,
        vision_config=vision,
        vq_config=codes,
        image_token_id=tokenizer.convert_tokens_to_ids(SPECIAL["image_token"]),
        tie_word_embeddings=False,
    )
    model = transformers.JanusForConditionalGeneration(config)
    draw = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = torch.randn(parameter.shape, generator=draw) * 0.2
    model.get_input_embeddings().weight.data *= 5  # what is asked shows in what is drawn
    ids = {name: tokenizer.convert_tokens_to_ids(SPECIAL[f"{name}_token"]) for name in ("bos", "eos", "pad", "boi")}
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=ids["bos"],
        eos_token_id=ids["eos"],
        pad_token_id=ids["pad"],
        generation_kwargs={"boi_token_id": ids["boi"]},
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def write_drawn_rows(folder: Path) -> Path:
    """Four rows, answered by a picture, by words and a picture, by words, and twice: by a picture that counts half, and
    by another one. Returns the JSONL."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, size in enumerate([(32, 32), (48, 32), (32, 64), (40, 40)]):
        pixels = bytes((7 * number + 13 * place + place // 29) % 256 for place in range(size[0] * size[1] * 3))
        Image.frombytes("RGB", size, pixels).save(folder / f"{number}.png")

    def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
        return {"role": role, "content": content, **more}

    rows = [
        {"messages": [turn("user", "Draw one."), turn("assistant", "<image>")], "images": ["1.png"]},
        {
            "messages": [turn("user", "<image>Turn it."), turn("assistant", "here: <image>")],
            "images": ["0.png", "2.png"],
        },
        {"messages": [turn("user", "<image>Which is it?"), turn("assistant", "three")], "images": ["3.png"]},
        {
            "messages": [
                turn("user", "Draw."),
                turn("assistant", "<image>", weight=0.5),
                turn("user", "Like <image>?"),
                turn("assistant", "<image>"),
            ],
            "images": ["1.png", "3.png", "2.png"],
        },
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
