"""Tiny folders of the models that Megatron-style checkpoints exist for, as transformers saves them.

Text has five layers and pictures three, with 8 heads in 4 groups, which tensor parallelism of 1, 2 and 4 divides.
Folders that no class of transformers writes (InternVLChat, InternLM2, DeepSeek-VL2) are made of random tensors under
the released names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.checkpoint.megatron.family import Config, MegatronFamily
from mindspeed_mm.checkpoint.megatron.folder import divided_files, megatron_tensors
from mindspeed_mm.checkpoint.megatron.layout import MegatronLayout
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

prepare_for_transformers()

H, HEADS, GROUPS, INNER, WORDS = 32, 8, 4, 48, 250
LAYERS, DEPTH = 5, 3
TEXT = {
    "hidden_size": H,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INNER,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PICTURES = {
    "hidden_size": H,
    "num_heads": 4,
    "depth": DEPTH,
    "intermediate_size": INNER,
    "out_hidden_size": H,
    "patch_size": 4,
}
DEEPSTACK = {"deepstack_visual_indexes": [0, 2], "num_position_embeddings": 16}
ROUTED = {"num_experts": 4, "moe_intermediate_size": 12, "num_experts_per_tok": 2, "head_dim": 16}
SHARED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 12,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": HEADS,
}
SOUNDS = {
    "d_model": H,
    "encoder_layers": 4,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": INNER,
    "output_dim": H,
    "num_mel_bins": 8,
}
ROTATED = {
    **TEXT,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]},
}
UNEVEN_HEADS = 5  # as InternViT's 25, no number of ranks divides them

_QWEN2_VISION = {"embed_dim": H, "num_heads": 4, "depth": DEPTH, "hidden_size": H, "mlp_ratio": 2, "patch_size": 4}
_INTERNVIT = {
    "hidden_size": 8 * UNEVEN_HEADS,
    "num_attention_heads": UNEVEN_HEADS,
    "num_hidden_layers": DEPTH,
    "intermediate_size": INNER,
    "patch_size": [4, 4],
    "image_size": [16, 16],
    "attention_bias": True,
}
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": H,
    "num_attention_heads": 4,
    "num_hidden_layers": DEPTH,
    "intermediate_size": INNER,
    "patch_size": 4,
    "image_size": 16,
}
_CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VL", {"text_config": ROTATED, "vision_config": _QWEN2_VISION, "tie_word_embeddings": True}),
    "qwen2_5_vl": ("Qwen2_5_VL", {"text_config": ROTATED, "vision_config": PICTURES, "tie_word_embeddings": False}),
    "qwen2_5_omni": (
        "Qwen2_5OmniThinker",
        {
            "text_config": ROTATED,
            "vision_config": PICTURES,
            "audio_config": SOUNDS,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {
            "text_config": {**TEXT, "head_dim": 16},
            "vision_config": {**PICTURES, **DEEPSTACK},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {
            "text_config": {**TEXT, **ROUTED},
            "vision_config": {**PICTURES, **DEEPSTACK},
            "tie_word_embeddings": False,
        },
    ),
    "internvl_hf": (
        "InternVL",
        {
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": _INTERNVIT,
            "tie_word_embeddings": False,
        },
    ),
    "glm4v": (
        "Glm4v",
        {
            "text_config": ROTATED,
            "vision_config": {**PICTURES, "image_size": 16},
            "tie_word_embeddings": False,
        },
    ),
    "deepseek_vl": (
        "DeepseekVL",
        {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": _SIGLIP,
            "tie_word_embeddings": False,
        },
    ),
    "llama": ("Llama", {**TEXT, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {**TEXT, "tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {**TEXT, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen2_moe": ("Qwen2Moe", {**TEXT, **ROUTED, "shared_expert_intermediate_size": 24, "tie_word_embeddings": False}),
    "qwen3_moe": ("Qwen3Moe", {**TEXT, **ROUTED, "mlp_only_layers": [1], "tie_word_embeddings": False}),
    "mixtral": ("Mixtral", {**TEXT, "num_local_experts": 4, "tie_word_embeddings": False}),
    "glm4_moe": ("Glm4Moe", {**TEXT, **SHARED, "head_dim": 16, "use_qk_norm": True, "tie_word_embeddings": False}),
    "deepseek_v2": ("DeepseekV2", {**TEXT, **SHARED, **LATENT, "q_lora_rank": None, "tie_word_embeddings": False}),
    "deepseek_v3": ("DeepseekV3", {**TEXT, **SHARED, **LATENT, "q_lora_rank": 20, "tie_word_embeddings": False}),
}
LANGUAGE_MODELS = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "mixtral",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
)


def save_tiny(name: str, folder: Path) -> Path:
    """Write config.json and model.safetensors of one model; the same bytes each time."""
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    if name in _SYNTHETIC:
        config, shapes = _SYNTHETIC[name]()
        (folder / "config.json").write_text(json.dumps(config))
        save_file({key: torch.randn(shape) for key, shape in shapes.items()}, folder / "model.safetensors")
        return folder
    prefix, sections = _CLASSES[name]
    config = getattr(transformers, f"{prefix}Config")(**sections)
    with torch.device("meta"):
        kind = "CausalLM" if name in LANGUAGE_MODELS else "ConditionalGeneration"
        model = getattr(transformers, f"{prefix}For{kind}")(config)
    model.to_empty(device="cpu")
    model.tie_weights()
    for tensor in model.state_dict().values():
        tensor.normal_()
    model.save_pretrained(folder)
    return folder


def _layers(count: int, start: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"{start}{n}.{key}": shape for n in range(count) for key, shape in shapes.items()}


def _linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _internvit_shapes() -> dict[str, tuple[int, ...]]:
    w = 8 * UNEVEN_HEADS
    layer = {"ls1": (w,), "ls2": (w,), **_linear("attn.qkv", 3 * w, w), **_linear("attn.proj", w, w)}
    layer |= {**_linear("mlp.fc1", INNER, w), **_linear("mlp.fc2", w, INNER)}
    layer |= {f"norm{i}.{p}": (w,) for i in (1, 2) for p in ("weight", "bias")}
    layer |= {"attn.q_norm.weight": (w,), "attn.k_norm.weight": (w,)}
    return {
        "vision_model.embeddings.class_embedding": (1, 1, w),
        "vision_model.embeddings.position_embedding": (1, 17, w),
        "vision_model.embeddings.patch_embedding.weight": (w, 3, 4, 4),
        "vision_model.embeddings.patch_embedding.bias": (w,),
        **_layers(DEPTH, "vision_model.encoder.layers.", layer),
        "mlp1.0.weight": (4 * w,),
        "mlp1.0.bias": (4 * w,),
        **_linear("mlp1.1", H, 4 * w),
        **_linear("mlp1.3", H, H),
    }


def _internvl_chat() -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Over Qwen2, with the head in the folder."""
    keys = H * GROUPS // HEADS
    attention = {**_linear("self_attn.q_proj", H, H), **_linear("self_attn.k_proj", keys, H)}
    attention |= {**_linear("self_attn.v_proj", keys, H), "self_attn.o_proj.weight": (H, H)}
    mlp = {"mlp.gate_proj.weight": (INNER, H), "mlp.up_proj.weight": (INNER, H), "mlp.down_proj.weight": (H, INNER)}
    norms = {"input_layernorm.weight": (H,), "post_attention_layernorm.weight": (H,)}
    shapes = {
        **_internvit_shapes(),
        "language_model.lm_head.weight": (WORDS, H),
        "language_model.model.embed_tokens.weight": (WORDS, H),
        "language_model.model.norm.weight": (H,),
        **_layers(LAYERS, "language_model.model.layers.", {**attention, **mlp, **norms}),
    }
    config = {"model_type": "internvl_chat", "llm_config": {"model_type": "qwen2", **TEXT}, "vision_config": _INTERNVIT}
    return config, shapes


def _internlm2() -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """InternVLChat over InternLM2."""
    rows = H // HEADS * (HEADS + 2 * GROUPS)
    layer: dict[str, tuple[int, ...]] = {"attention.wqkv.weight": (rows, H), "attention.wo.weight": (H, H)}
    layer |= {"feed_forward.w1.weight": (INNER, H), "feed_forward.w3.weight": (INNER, H)}
    layer |= {"feed_forward.w2.weight": (H, INNER), "attention_norm.weight": (H,), "ffn_norm.weight": (H,)}
    shapes = {
        **_internvit_shapes(),
        "language_model.output.weight": (WORDS, H),
        "language_model.model.tok_embeddings.weight": (WORDS, H),
        "language_model.model.norm.weight": (H,),
        **_layers(LAYERS, "language_model.model.layers.", layer),
    }
    text = {"model_type": "internlm2", **TEXT}
    return {"model_type": "internvl_chat", "llm_config": text, "vision_config": _INTERNVIT}, shapes


def _deepseek_vl2() -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    experts, width, nope, rope, latent = 4, 12, 8, 4, 16
    text = {
        **{key: TEXT[key] for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")},
        "n_routed_experts": experts,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": latent,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
    }
    attention: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (HEADS * (nope + rope), H),
        "self_attn.kv_a_proj_with_mqa.weight": (latent + rope, H),
        "self_attn.kv_a_layernorm.weight": (latent,),
        "self_attn.kv_b_proj.weight": (HEADS * (nope + 8), latent),
        "self_attn.o_proj.weight": (H, HEADS * 8),
        "input_layernorm.weight": (H,),
        "post_attention_layernorm.weight": (H,),
    }
    routed = {"mlp.gate.weight": (experts, H), "mlp.gate.e_score_correction_bias": (experts,)}
    routed |= _gated("mlp.shared_experts", 2 * width)
    for e in range(experts):
        routed |= _gated(f"mlp.experts.{e}", width)
    layers = [{**attention, **(routed if n else _gated("mlp", INNER))} for n in range(LAYERS)]
    shapes: dict[str, tuple[int, ...]] = {
        "image_newline": (H,),
        "view_seperator": (H,),
        "language.lm_head.weight": (WORDS, H),
        "language.model.embed_tokens.weight": (WORDS, H),
        "language.model.norm.weight": (H,),
        **{f"language.model.layers.{n}.{key}": shape for n, layer in enumerate(layers) for key, shape in layer.items()},
        "vision.pos_embed": (1, 16, H),
        **_linear("vision.patch_embed.proj", H, 48),
        **_layers(DEPTH, "vision.blocks.", {**_linear("attn.qkv", 3 * H, H), **_linear("mlp.fc1", INNER, H)}),
        **_linear("vision.norm", H, 1),
        **_linear("vision.attn_pool.q", H, H),
        "vision.attn_pool.latent": (1, 1, H),
        **_linear("projector.layers.0", H, H),
        **_linear("projector.layers.2", H, H),
    }
    vision = {"layers": DEPTH, "width": H}
    return {"model_type": "deepseek_vl_v2", "language_config": text, "vision_config": vision}, shapes


def _gated(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj.weight": (width, H),
        f"{name}.up_proj.weight": (width, H),
        f"{name}.down_proj.weight": (H, width),
    }


_SYNTHETIC = {"internvl_chat": _internvl_chat, "internlm2": _internlm2, "deepseek_vl2": _deepseek_vl2}
NAMES = (*_CLASSES, *_SYNTHETIC)


def files_of(
    hub: Mapping[str, LazyTensor], family: MegatronFamily, config: Config, layout: MegatronLayout
) -> dict[str, dict[str, dict[str, LazyTensor]]]:
    """What a folder in this division holds of a model under the hub's names."""
    model = family.model(config, canonical=layout.canonical)
    return divided_files(megatron_tensors(hub, model), model, layout)
