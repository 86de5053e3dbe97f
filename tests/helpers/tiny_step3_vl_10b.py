"""A tiny folder of Step3-VL-10B, written as the released one is, by hand and without the code under test."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.helpers.tiny_processors import byte_tokenizer

WIDTH, HEADS_SEE, PATCH, SIDE, CROP = 32, 2, 4, 32, 16
"""Of the tower: features, heads, pixels of a patch, of a whole picture and of a crop."""
INNER_SEE, BLOCKS = 48, 2
HIDDEN, INNER, HEADS, GROUPS, HEAD, LAYERS = 32, 48, 4, 2, 8, 2
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' %}{{ '<im_patch>' }}
{%- elif part.type == 'text' %}{{ part.text }}{% endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""
_MARKS = ("patch_start", "patch_end", "patch_newline", "im_start", "im_end")
_SPECIAL = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "turn_token": "<|im_start|>"}


def make_tiny_step3_vl_10b(folder: Path) -> dict[str, torch.Tensor]:
    """Write the folder; the tensors that it holds, by their released names."""
    folder.mkdir(parents=True, exist_ok=True)
    marks = {"image_token": "<im_patch>"} | {f"mark_{mark}": f"<{mark}>" for mark in _MARKS}
    tokenizer = byte_tokenizer(_SPECIAL | marks, TEMPLATE)
    tokenizer.save_pretrained(folder)
    words = len(tokenizer) + 2 + len(tokenizer) % 2  # more than there are, as released; two tensor ranks share them
    text = {
        "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": HEAD, "vocab_size": words,
        "rope_theta": 1000000.0, "max_position_embeddings": 4096, "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    vision = {
        "image_size": SIDE, "patch_size": PATCH, "width": WIDTH, "layers": BLOCKS, "heads": HEADS_SEE,
        "mlp_ratio": INNER_SEE / WIDTH, "hidden_act": "quick_gelu", "use_cls_token": False, "ls_init_value": 0.1,
        "use_rope2d": True, "use_abs_posemb": True, "use_ln_pre": True, "use_ln_post": False,
    }  # fmt: skip
    config = {
        "architectures": ["StepVLForConditionalGeneration"], "model_type": "step_robotics",
        "auto_map": {"AutoConfig": "configuration_step_vl.StepRoboticsConfig"}, "understand_projector_stride": 2,
        "projector_bias": False, "image_token_id": tokenizer.convert_tokens_to_ids("<im_patch>"),
        "vision_config": vision, "text_config": text, "torch_dtype": "float32",
    }  # fmt: skip
    images = {"size": {"height": SIDE, "width": SIDE}, "patch_size": CROP, "max_image_size": 128}
    images |= {"vision_patch_size": PATCH, "downsampler_stride": 4}
    processor = {"processor_class": "Step3VLProcessor"}
    processor |= {"auto_map": {"AutoProcessor": "processing_step3.Step3VLProcessor"}}
    written = {"config": config, "preprocessor_config": images, "processor_config": processor}
    for name, content in written.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    tensors = {name: _value(name, shape) for name, shape in released_shapes(words).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def released_shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Every name of the release with its shape, written out by hand."""
    tower = "vision_model"
    shapes: dict[str, tuple[int, ...]] = {
        f"{tower}.conv1.weight": (WIDTH, 3, PATCH, PATCH),
        f"{tower}.positional_embedding": ((SIDE // PATCH) ** 2, WIDTH),
        f"{tower}.vit_downsampler1.weight": (2 * WIDTH, WIDTH, 3, 3),
        f"{tower}.vit_downsampler1.bias": (2 * WIDTH,),
        f"{tower}.vit_downsampler2.weight": (4 * WIDTH, 2 * WIDTH, 3, 3),
        f"{tower}.vit_downsampler2.bias": (4 * WIDTH,),
        "vit_large_projector.weight": (HIDDEN, 4 * WIDTH),
        "model.embed_tokens.weight": (vocabulary, HIDDEN),
        "lm_head.weight": (vocabulary, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    norms = [f"{tower}.ln_pre"]
    for block in (f"{tower}.transformer.resblocks.{number}" for number in range(BLOCKS)):
        norms += [f"{block}.ln_1", f"{block}.ln_2"]
        shapes |= {f"{block}.ls_{number}.gamma": (WIDTH,) for number in (1, 2)}
        shapes |= {f"{block}.attn.in_proj_weight": (3 * WIDTH, WIDTH), f"{block}.attn.in_proj_bias": (3 * WIDTH,)}
        linear = {"attn.out_proj": (WIDTH, WIDTH), "mlp.c_fc": (INNER_SEE, WIDTH), "mlp.c_proj": (WIDTH, INNER_SEE)}
        for name, (out, inner) in linear.items():
            shapes |= {f"{block}.{name}.weight": (out, inner), f"{block}.{name}.bias": (out,)}
    shapes |= {f"{norm}.{kind}": (WIDTH,) for norm in norms for kind in ("weight", "bias")}
    for layer in (f"model.layers.{number}" for number in range(LAYERS)):
        own: dict[str, tuple[int, ...]] = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_norm": (HEAD,),
            "self_attn.k_norm": (HEAD,),
            "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
            "self_attn.k_proj": (GROUPS * HEAD, HIDDEN),
            "self_attn.v_proj": (GROUPS * HEAD, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        shapes |= {f"{layer}.{name}.weight": shape for name, shape in own.items()}
    return shapes


def _value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name)) * 7919 + len(name)))
    return drawn * 0.1 + 1 if ("norm" in name or ".ln_" in name) and name.endswith("weight") else drawn * 0.3
