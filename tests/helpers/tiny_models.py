"""Model folders small enough for a test, made without a download: weights, processor, tokenizer and chat template are
those of the real classes, only the sizes are tiny. A folder takes a few tenths of a second to make.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from tests.helpers.made_once import made_once

prepare_for_transformers()

from transformers import (  # noqa: E402  (the guard comes first)
    Gemma2Config,
    Gemma2ForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

VOCAB_SIZE = 320
PATCH_SIZE = 8
MERGE_SIZE = 2
MAX_PIXELS = 64 * 64

SPECIAL_TOKENS = {
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "turn_start_token": "<|im_start|>",
}

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif part.type == 'text' -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

_CORPUS = [
    "system\nuser\nassistant\nYou are a helpful assistant.",
    "Which digit is this? What is shown in the image? Answer with one word.",
    "zero one two three four five six seven eight nine ten 0 1 2 3 4 5 6 7 8 9",
]


@made_once
def make_tiny_qwen3_vl(
    folder: Path, *, seed: int = 0, tie: bool = True, dtype: torch.dtype = torch.float32, **text: Any
) -> Path:
    """A Qwen3-VL folder of about 0.1 M parameters with its processor; image patches are 8 × 8 pixels.

    Args:
        folder: Where to write; made when absent.
        seed: Of the random weights.
        tie: Whether the head shares the embedding's weight.
        dtype: Of the stored weights.
        text: Fields of the text configuration to change, e.g. `num_hidden_layers=3`.
    """
    processor = _processor()
    _save(Qwen3VLForConditionalGeneration, _qwen3_vl_config(processor.tokenizer, tie, text), folder, seed, dtype)
    processor.save_pretrained(folder)
    return folder


@made_once
def make_tiny_qwen3(
    folder: Path, *, seed: int = 0, tie: bool = False, dtype: torch.dtype = torch.float32, **text: Any
) -> Path:
    """A Qwen3 (text only) folder of about 40 k parameters with its tokenizer. Arguments as above."""
    tokenizer = build_tokenizer()
    config = Qwen3Config(**_TEXT | _token_ids(tokenizer) | {"tie_word_embeddings": tie} | text)
    _save(Qwen3ForCausalLM, config, folder, seed, dtype)
    tokenizer.save_pretrained(folder)
    return folder


@made_once
def make_tiny_gemma2(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **text: Any) -> Path:
    """A Gemma 2 (text only) folder with the tokenizer of the others; it caps its logits. Arguments as above."""
    tokenizer = build_tokenizer()
    config = Gemma2Config(**_TEXT | _token_ids(tokenizer) | {"final_logit_softcapping": 30.0} | text)
    _save(Gemma2ForCausalLM, config, folder, seed, dtype)
    tokenizer.save_pretrained(folder)
    return folder


@made_once
def make_tiny_qwen3_moe(
    folder: Path, *, seed: int = 0, tie: bool = False, dtype: torch.dtype = torch.float32, **text: Any
) -> Path:
    """A Qwen3-MoE (text only) folder: 8 experts a layer, 2 a token. Arguments as above."""
    tokenizer = build_tokenizer()
    config = Qwen3MoeConfig(**_TEXT | _EXPERTS | _token_ids(tokenizer) | {"tie_word_embeddings": tie} | text)
    _save(Qwen3MoeForCausalLM, config, folder, seed, dtype)
    tokenizer.save_pretrained(folder)
    return folder


@made_once
def make_tiny_qwen3_vl_moe(
    folder: Path, *, seed: int = 0, tie: bool = False, dtype: torch.dtype = torch.float32, **text: Any
) -> Path:
    """A Qwen3-VL-MoE folder with its processor: as `make_tiny_qwen3_vl`, with 8 experts a layer, 2 a token."""
    processor = _processor()
    config = _qwen3_vl_config(processor.tokenizer, tie, _EXPERTS | text, Qwen3VLMoeConfig)
    _save(Qwen3VLMoeForConditionalGeneration, config, folder, seed, dtype)
    processor.save_pretrained(folder)
    return folder


def build_tokenizer(special_tokens: Mapping[str, str] = SPECIAL_TOKENS) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 320 tokens trained on three lines, with Qwen's special tokens and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(special_tokens.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    extra = {name: token for name, token in special_tokens.items() if name not in ("eos_token", "pad_token")}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=special_tokens["eos_token"],
        pad_token=special_tokens["pad_token"],
        extra_special_tokens=extra,
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
        padding_side="right",
    )


_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}

_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}

_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": PATCH_SIZE,
    "spatial_merge_size": MERGE_SIZE,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}


def _qwen3_vl_config(
    tokenizer: PreTrainedTokenizerFast, tie: bool, text: dict[str, Any], config_class: Any = Qwen3VLConfig
) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    markers = ("image_token", "video_token", "vision_start_token", "vision_end_token")
    return config_class(
        text_config=_TEXT | {"rope_parameters": rope, "tie_word_embeddings": tie} | _token_ids(tokenizer) | text,
        vision_config=dict(_VISION),
        tie_word_embeddings=tie,
        **{f"{name}_id": tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS[name]) for name in markers},
    )


def _token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    return {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}


def _processor() -> Qwen3VLProcessor:
    patches = {"patch_size": PATCH_SIZE, "merge_size": MERGE_SIZE, "temporal_patch_size": 2}
    area = {"shortest_edge": (PATCH_SIZE * MERGE_SIZE) ** 2, "longest_edge": MAX_PIXELS}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=dict(area), **patches),
        tokenizer=build_tokenizer(),
        video_processor=Qwen3VLVideoProcessor(size={**area, "longest_edge": 8 * MAX_PIXELS}, **patches),
        chat_template=CHAT_TEMPLATE,
    )


def _save(cls: type[PreTrainedModel], config: Any, folder: Path, seed: int, dtype: torch.dtype) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls(config).to(dtype)
    config.dtype = dtype
    tokens = {name: getattr(config.get_text_config(), name) for name in ("eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**tokens, max_new_tokens=16)
    model.save_pretrained(folder)


def without_template(folder: Path, model: Path) -> Path:
    """A copy of a model folder as base models are released."""
    shutil.copytree(model, folder)
    for path in (*folder.glob("chat_template*"), *folder.glob("*.json")):
        if path.name.startswith("chat_template"):
            path.unlink()
            continue
        content = json.loads(path.read_text())
        if isinstance(content, dict) and content.pop("chat_template", None):
            path.write_text(json.dumps(content))
    return folder
