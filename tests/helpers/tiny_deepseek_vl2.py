"""Tiny folders of DeepSeek-VL2, written as the released ones are: their config.json, processor_config.json and names of
weights, by hand and without the code under test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.helpers.tiny_processors import byte_tokenizer

WIDTH, PATCH, TILE, DOWNSAMPLE = 24, 4, 20, 2
HIDDEN, DENSE, EXPERT, EXPERTS, SHARED, HEADS = 32, 40, 24, 8, 2, 4
LATENT, PLAIN, ROTATED, VALUE = 16, 8, 4, 12
"""Widths of multi-head latent attention: the latent, and of a head the parts of a key, and its value."""
VISION = {"width": WIDTH, "layers": 2, "heads": 3, "mlp_ratio": 2.5, "patch_size": PATCH, "image_size": TILE}
PROJECTOR = {"projector_type": "downsample_mlp_gelu", "input_dim": WIDTH, "n_embed": HIDDEN, "depth": 2, "mlp_ratio": 1}
RESOLUTIONS = [[20, 20], [20, 40], [40, 20], [40, 40], [20, 60], [60, 20]]
LATENT_ATTENTION = {
    "use_mla": True,
    "kv_lora_rank": LATENT,
    "q_lora_rank": None,
    "qk_nope_head_dim": PLAIN,
    "qk_rope_head_dim": ROTATED,
    "v_head_dim": VALUE,
}
NO_LATENT = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0)
KINDS: dict[str, dict[str, Any]] = {
    "tiny": {"use_mla": False, "kv_lora_rank": None, "q_lora_rank": None, **NO_LATENT},
    "small": LATENT_ATTENTION,
    "base": LATENT_ATTENTION
    | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "n_group": 1, "topk_group": 1}
    | {"routed_scaling_factor": 2.0},
}
"""Released size → what its text model has of its own."""
SPECIAL = {
    "bos_token": "<｜begin▁of▁sentence｜>",
    "eos_token": "<｜end▁of▁sentence｜>",
    "pad_token": "<｜▁pad▁｜>",
    "image_token": "<image>",
    "user_token": "<|User|>",
    "assistant_token": "<|Assistant|>",
}


def make_tiny_deepseek_vl2(folder: Path, kind: str = "small", layers: int = 3) -> dict[str, torch.Tensor]:
    """Write a folder; the tensors that it holds, by their released names."""
    folder.mkdir(parents=True)
    tokenizer = byte_tokenizer(SPECIAL, None)
    tokenizer.save_pretrained(folder)
    text = text_settings(kind, layers, tokenizer)
    config = {
        "architectures": ["DeepseekVLV2ForCausalLM"],
        "model_type": "deepseek_vl_v2",
        "tile_tag": "2D",
        "global_view_pos": "head",
        "candidate_resolutions": RESOLUTIONS,
        "language_config": text,
        "projector_config": PROJECTOR | {"model_type": "mlp_projector", "downsample_ratio": DOWNSAMPLE},
        "vision_config": VISION | {"model_type": "vision", "model_name": "siglip"},
        "torch_dtype": "float32",
    }
    processor = {
        "processor_class": "DeepseekVLV2Processor",
        "candidate_resolutions": RESOLUTIONS,
        "patch_size": PATCH,
        "downsample_ratio": DOWNSAMPLE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "normalize": True,
        "image_token": "<image>",
        "pad_token": "<｜▁pad▁｜>",
        "add_special_token": False,
        "sft_format": "deepseek",
        "mask_prompt": True,
        "ignore_id": -100,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    tensors = {name: value_of(name, shape) for name, shape in released_shapes(text).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def text_settings(kind: str, layers: int, tokenizer: Any) -> dict[str, Any]:
    """What config.json says of a text model."""
    return KINDS[kind] | {
        "model_type": "deepseek_v2",
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "intermediate_size": DENSE,
        "moe_intermediate_size": EXPERT,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": SHARED,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 512,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def released_shapes(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every name of a release with its shape, written out by hand."""
    shapes: dict[str, tuple[int, ...]] = {"image_newline": (HIDDEN,), "view_seperator": (HIDDEN,)}

    def linear(name: str, out: int, inner: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (out, inner), (out,)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (WIDTH,), (WIDTH,)

    inner, side = 60, TILE // PATCH
    shapes["vision.patch_embed.proj.weight"] = (WIDTH, 3, PATCH, PATCH)
    shapes["vision.patch_embed.proj.bias"] = (WIDTH,)
    shapes["vision.pos_embed"] = (1, side * side, WIDTH)
    for block in (f"vision.blocks.{number}" for number in range(2)):
        norm(f"{block}.norm1")
        norm(f"{block}.norm2")
        linear(f"{block}.attn.qkv", 3 * WIDTH, WIDTH)
        linear(f"{block}.attn.proj", WIDTH, WIDTH)
        linear(f"{block}.mlp.fc1", inner, WIDTH)
        linear(f"{block}.mlp.fc2", WIDTH, inner)
    norm("vision.norm")
    shapes["vision.attn_pool.latent"] = (1, 1, WIDTH)
    linear("vision.attn_pool.q", WIDTH, WIDTH)
    linear("vision.attn_pool.kv", 2 * WIDTH, WIDTH)
    linear("vision.attn_pool.proj", WIDTH, WIDTH)
    norm("vision.attn_pool.norm")
    linear("vision.attn_pool.mlp.fc1", inner, WIDTH)
    linear("vision.attn_pool.mlp.fc2", WIDTH, inner)
    linear("projector.layers.0", HIDDEN, 4 * WIDTH)
    linear("projector.layers.2", HIDDEN, HIDDEN)
    return shapes | text_shapes(text, "language.")


def text_shapes(text: dict[str, Any], prefix: str) -> dict[str, tuple[int, ...]]:
    """Of a text model, under names that begin with `prefix`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for end in ("model.embed_tokens", "lm_head"):
        shapes[f"{prefix}{end}.weight"] = (text["vocab_size"], HIDDEN)
    shapes[f"{prefix}model.norm.weight"] = (HIDDEN,)
    for number in range(text["num_hidden_layers"]):
        layer = f"{prefix}model.layers.{number}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{name}.weight"] = (HIDDEN,)
        attention = {f"{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
        if text["use_mla"]:
            attention = {
                "q_proj": (HEADS * (PLAIN + ROTATED), HIDDEN),
                "kv_a_proj_with_mqa": (LATENT + ROTATED, HIDDEN),
                "kv_a_layernorm": (LATENT,),  # type: ignore[dict-item]
                "kv_b_proj": (HEADS * (PLAIN + VALUE), LATENT),
                "o_proj": (HIDDEN, HEADS * VALUE),
            }
        shapes |= {f"{layer}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        parts = {"": DENSE} if number == 0 else {"shared_experts.": SHARED * EXPERT}
        if number > 0:
            parts |= {f"experts.{expert}.": EXPERT for expert in range(EXPERTS)}
            shapes[f"{layer}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
            if text.get("topk_method") == "noaux_tc":
                shapes[f"{layer}.mlp.gate.e_score_correction_bias"] = (EXPERTS,)
        for part, inner in parts.items():
            shapes[f"{layer}.mlp.{part}gate_proj.weight"] = shapes[f"{layer}.mlp.{part}up_proj.weight"] = (
                inner,
                HIDDEN,
            )
            shapes[f"{layer}.mlp.{part}down_proj.weight"] = (HIDDEN, inner)
    return shapes


def value_of(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers that belong to the name, large enough that every part is seen in the result."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name)) * 7919 + len(name)))
    return drawn * 0.1 + 1 if "norm" in name and name.endswith("weight") else drawn * 0.3
