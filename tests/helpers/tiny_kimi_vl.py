"""A tiny folder of Kimi-VL, written as the released one is, by hand and without the code under test."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.helpers.tiny_processors import byte_tokenizer

WIDTH, HEADS_SEE, PATCH, SIDE = 24, 3, 4, 8
"""Of the tower: features, heads, pixels of a patch, and places along a side of its table."""
HIDDEN, DENSE, EXPERT, EXPERTS, SHARED, HEADS = 32, 40, 24, 8, 2, 4
LATENT, PLAIN, ROTATED, VALUE = 16, 8, 4, 12
LAYERS = 3
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' -}}
{%- if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' %}{{ '<|media_start|>image<|media_content|><|media_pad|><|media_end|>' }}
{%- elif part.type == 'text' %}{{ part.text }}{% endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif -%}
"""
_MARKS = ("media_start", "media_content", "media_end", "im_user", "im_assistant", "im_system", "im_middle")
_SPECIAL = {"bos_token": "[BOS]", "eos_token": "<|im_end|>", "pad_token": "[PAD]", "image_token": "<|media_pad|>"}


def make_tiny_kimi_vl(folder: Path, layers: int = LAYERS) -> dict[str, torch.Tensor]:
    """Write the folder; the tensors that it holds, by their released names."""
    folder.mkdir(parents=True)
    tokenizer = byte_tokenizer(_SPECIAL | {f"{mark}_token": f"<|{mark}|>" for mark in _MARKS}, TEMPLATE)
    tokenizer.save_pretrained(folder)
    text = {
        "model_type": "deepseek_v3", "hidden_size": HIDDEN, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "intermediate_size": DENSE, "moe_intermediate_size": EXPERT,
        "n_routed_experts": EXPERTS, "n_shared_experts": SHARED, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "kv_lora_rank": LATENT, "q_lora_rank": None, "qk_nope_head_dim": PLAIN, "qk_rope_head_dim": ROTATED,
        "v_head_dim": VALUE, "vocab_size": len(tokenizer), "rope_theta": 800000.0, "routed_scaling_factor": 2.446,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    vision = {
        "model_type": "moonvit", "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS_SEE,
        "intermediate_size": 36, "patch_size": PATCH, "init_pos_emb_height": SIDE, "init_pos_emb_width": SIDE,
        "merge_kernel_size": [2, 2],
    }  # fmt: skip
    config = {
        "architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl", "text_config": text,
        "vision_config": vision, "ignore_index": -100, "torch_dtype": "float32", "vocab_size": len(tokenizer),
        "media_placeholder_token_id": tokenizer.convert_tokens_to_ids("<|media_pad|>"),
    }  # fmt: skip
    images = {
        "image_processor_type": "KimiVLImageProcessor", "processor_class": "KimiVLProcessor", "patch_size": PATCH,
        "in_token_limit": 64, "pad_input": True, "num_pooled_tokens": 1024, "merge_kernel_size": [2, 2],
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    tensors = {name: _value(name, shape) for name, shape in released_shapes(len(tokenizer), layers).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def released_shapes(vocabulary: int, layers: int) -> dict[str, tuple[int, ...]]:
    """Every name of the release with its shape, written out by hand."""
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (WIDTH, 3, PATCH, PATCH),
        "vision_tower.patch_embed.proj.bias": (WIDTH,),
        "vision_tower.patch_embed.pos_emb.weight": (SIDE, SIDE, WIDTH),
    }

    def linear(name: str, out: int, inner: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (out, inner), (out,)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (WIDTH,), (WIDTH,)

    for block in (f"vision_tower.encoder.blocks.{number}" for number in range(2)):
        norm(f"{block}.norm0")
        norm(f"{block}.norm1")
        linear(f"{block}.wqkv", 3 * WIDTH, WIDTH)
        linear(f"{block}.wo", WIDTH, WIDTH)
        linear(f"{block}.mlp.fc0", 36, WIDTH)
        linear(f"{block}.mlp.fc1", WIDTH, 36)
    norm("vision_tower.encoder.final_layernorm")
    norm("multi_modal_projector.pre_norm")
    linear("multi_modal_projector.linear_1", 4 * WIDTH, 4 * WIDTH)
    linear("multi_modal_projector.linear_2", HIDDEN, 4 * WIDTH)
    for end in ("model.embed_tokens", "lm_head"):
        shapes[f"language_model.{end}.weight"] = (vocabulary, HIDDEN)
    shapes["language_model.model.norm.weight"] = (HIDDEN,)
    for number in range(layers):
        layer = f"language_model.model.layers.{number}"
        own: dict[str, tuple[int, ...]] = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HEADS * (PLAIN + ROTATED), HIDDEN),
            "self_attn.kv_a_proj_with_mqa": (LATENT + ROTATED, HIDDEN),
            "self_attn.kv_a_layernorm": (LATENT,),
            "self_attn.kv_b_proj": (HEADS * (PLAIN + VALUE), LATENT),
            "self_attn.o_proj": (HIDDEN, HEADS * VALUE),
        }
        parts = {"": DENSE} if number == 0 else {"shared_experts.": SHARED * EXPERT}
        if number > 0:
            parts |= {f"experts.{expert}.": EXPERT for expert in range(EXPERTS)}
            own["mlp.gate"] = (EXPERTS, HIDDEN)
            shapes[f"{layer}.mlp.gate.e_score_correction_bias"] = (EXPERTS,)
        for part, inner in parts.items():
            own |= {f"mlp.{part}{name}_proj": (inner, HIDDEN) for name in ("gate", "up")}
            own[f"mlp.{part}down_proj"] = (HIDDEN, inner)
        shapes |= {f"{layer}.{name}.weight": shape for name, shape in own.items()}
    return shapes


def _value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name)) * 7919 + len(name)))
    return drawn * 0.1 + 1 if "norm" in name and name.endswith("weight") else drawn * 0.3
