"""A tiny folder of Kimi-K3, written as the released one is, by hand and without the code under test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.helpers.tiny_processors import byte_tokenizer

Shapes = dict[str, tuple[int, ...]]

HIDDEN, DENSE, LAYERS, BLOCK = 48, 40, 5, 2
LATENT_LAYERS = (3, 4)
"""Layers of latent attention, from 0: the last two, as released. Of two layers the sum is a source for those behind."""
STATE_HEADS, STATE_HEAD, CONVOLVED, LOWER = 3, 8, 4, -5.0
HEADS, PLAIN, SHARED_KEY, VALUE, Q_RANK, KV_RANK = 4, 8, 4, 12, 16, 12
EXPERTS, GROUPS, CHOSEN, EXPERT, NARROW, SHARED, SCALED = 8, 2, 2, 32, 32, 2, 1.7
BETA, LINEAR_BETA = 4.0, 25.0
WIDTH, HEADS_SEE, SEEN_HEADS, SEEN_INNER, SEEN_LAYERS, PATCH, SIDE = 24, 3, 36, 40, 2, 4, 8
"""Of the tower: features, heads, features of all heads, pixels of a patch, places along a side of its table."""
_MARKS = ("media_begin", "media_content", "media_end", "media_pad", "end_of_msg")
_PLAIN_MARKS = ("<|open|>", "<|close|>", "<|sep|>")
"""Added tokens that the released tokenizer does not call special."""
_SPECIAL = {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]"}


def make_tiny_kimi_k3(folder: Path) -> dict[str, torch.Tensor]:
    """Write the folder; the tensors that it holds, by their released names."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer(_SPECIAL | {f"{mark}_token": f"<|{mark}|>" for mark in _MARKS}, None)
    tokenizer.add_tokens(list(_PLAIN_MARKS))
    tokenizer.save_pretrained(folder)
    words = len(tokenizer) + len(tokenizer) % 2
    config = settings(words)
    config |= {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
    config |= {"eos_token_id": tokenizer.convert_tokens_to_ids("<|end_of_msg|>")}
    config["media_placeholder_token_id"] = tokenizer.convert_tokens_to_ids("<|media_pad|>")
    pictures = {
        "auto_map": {"AutoProcessor": "kimi_k3_processor.KimiK3Processor"},
        "media_proc_cfg": {
            "in_patch_limit": 64, "patch_size": PATCH, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
            "merge_kernel_size": 2, "fixed_output_tokens": None, "patch_limit_on_one_side": 16,
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures), encoding="utf-8")
    tensors = {name: value(name, shape) for name, shape in released_shapes(words).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def settings(words: int) -> dict[str, Any]:
    """The released settings at tiny sizes."""
    latent = [number + 1 for number in LATENT_LAYERS]
    text = {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_size": HIDDEN,
        "intermediate_size": DENSE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "qk_nope_head_dim": PLAIN, "qk_rope_head_dim": SHARED_KEY, "v_head_dim": VALUE,
        "q_lora_rank": Q_RANK, "kv_lora_rank": KV_RANK, "mla_use_nope": True, "mla_use_output_gate": True,
        "linear_attn_config": {
            "full_attn_layers": latent, "kda_layers": [n for n in range(1, LAYERS + 1) if n not in latent],
            "num_heads": STATE_HEADS, "head_dim": STATE_HEAD, "short_conv_kernel_size": CONVOLVED,
            "gate_lower_bound": LOWER, "use_full_rank_gate": True,
        },
        "attn_res_block_size": BLOCK, "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_experts": EXPERTS,
        "num_experts_per_token": CHOSEN, "num_expert_group": GROUPS, "topk_group": 1, "num_shared_experts": SHARED,
        "moe_intermediate_size": EXPERT, "routed_expert_hidden_size": NARROW, "latent_moe_use_norm": True,
        "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "routed_scaling_factor": SCALED,
        "topk_method": "noaux_tc", "use_grouped_topk": True, "hidden_act": "situ", "activation_situ_beta": BETA,
        "activation_situ_linear_beta": LINEAR_BETA, "rms_norm_eps": 1e-5, "initializer_range": 0.02,
        "max_position_embeddings": 4096, "num_nextn_predict_layers": 0, "tie_word_embeddings": False,
        "vocab_size": words, "pad_token_id": None,
    }  # fmt: skip
    vision = {
        "_attn_implementation": "flash_attention_2", "activation_func": "gelu_pytorch_tanh", "attn_bias": False,
        "init_pos_emb_height": SIDE, "init_pos_emb_time": 4, "init_pos_emb_width": SIDE, "linear_bias": False,
        "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool", "mlp_type": "mlp2", "mm_hidden_size": WIDTH,
        "mm_projector_type": "patchmergerv2", "norm_type": "rmsnorm", "patch_embed_proj_bias": False,
        "patch_size": PATCH, "pos_emb_interpolation_mode": "bilinear", "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5, "qkv_hidden_size": SEEN_HEADS,
        "text_hidden_size": HIDDEN, "vt_hidden_size": WIDTH, "vt_intermediate_size": SEEN_INNER,
        "vt_num_attention_heads": HEADS_SEE, "vt_num_hidden_layers": SEEN_LAYERS,
    }  # fmt: skip
    return {
        "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "float32",
        "auto_map": {"AutoConfig": "configuration_kimi_k3.KimiK3Config"}, "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>", "tie_word_embeddings": False, "text_config": text,
        "vision_config": vision,
    }  # fmt: skip


def released_shapes(words: int) -> Shapes:
    """Every name of the release with its shape, written out by hand."""
    shapes: Shapes = {f"language_model.{name}.weight": (words, HIDDEN) for name in ("model.embed_tokens", "lm_head")}
    for name in ("norm", "output_attn_res_norm"):
        shapes[f"language_model.model.{name}.weight"] = (HIDDEN,)
    shapes["language_model.model.output_attn_res_proj.weight"] = (1, HIDDEN)
    norms = ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm")
    for number in range(LAYERS):
        layer = f"language_model.model.layers.{number}."
        shapes |= {f"{layer}{name}.weight": (HIDDEN,) for name in norms}
        shapes |= {f"{layer}{name}.weight": (1, HIDDEN) for name in ("self_attention_res_proj", "mlp_res_proj")}
        attention = _latent() if number in LATENT_LAYERS else _with_state()
        shapes |= {f"{layer}self_attn.{name}": shape for name, shape in attention.items()}
        inner = _gated("mlp.", DENSE) if number == 0 else _experts()
        shapes |= {f"{layer}{name}": shape for name, shape in inner.items()}
    return shapes | _tower()


def _with_state() -> Shapes:
    wide = STATE_HEADS * STATE_HEAD
    shapes: Shapes = {f"{name}_proj.weight": (wide, HIDDEN) for name in "qkvg"}
    shapes |= {f"{name}_conv1d.weight": (wide, 1, CONVOLVED) for name in "qkv"}
    # A_log is as wide as a head, of which one number a head counts.
    return shapes | {
        "A_log": (STATE_HEAD,), "dt_bias": (wide,), "b_proj.weight": (STATE_HEADS, HIDDEN),
        "f_a_proj.weight": (STATE_HEAD, HIDDEN), "f_b_proj.weight": (wide, STATE_HEAD),
        "o_norm.weight": (STATE_HEAD,), "o_proj.weight": (HIDDEN, wide),
    }  # fmt: skip


def _latent() -> Shapes:
    return {
        "q_a_proj.weight": (Q_RANK, HIDDEN), "q_a_layernorm.weight": (Q_RANK,),
        "q_b_proj.weight": (HEADS * (PLAIN + SHARED_KEY), Q_RANK),
        "kv_a_proj_with_mqa.weight": (KV_RANK + SHARED_KEY, HIDDEN), "kv_a_layernorm.weight": (KV_RANK,),
        "kv_b_proj.weight": (HEADS * (PLAIN + VALUE), KV_RANK),
        "g_proj.weight": (HEADS * VALUE, HIDDEN), "o_proj.weight": (HIDDEN, HEADS * VALUE),
    }  # fmt: skip


def _gated(prefix: str, inner: int) -> Shapes:
    shapes: Shapes = {f"{prefix}{name}_proj.weight": (inner, HIDDEN) for name in ("gate", "up")}
    return shapes | {f"{prefix}down_proj.weight": (HIDDEN, inner)}


def _experts() -> Shapes:
    moe = "block_sparse_moe."
    shapes: Shapes = {f"{moe}gate.weight": (EXPERTS, HIDDEN), f"{moe}gate.e_score_correction_bias": (EXPERTS,)}
    shapes |= _gated(f"{moe}shared_experts.", SHARED * EXPERT)
    shapes |= {f"{moe}routed_expert_down_proj.weight": (NARROW, HIDDEN), f"{moe}routed_expert_norm.weight": (NARROW,)}
    shapes[f"{moe}routed_expert_up_proj.weight"] = (HIDDEN, NARROW)
    for expert in range(EXPERTS):
        shapes |= {f"{moe}experts.{expert}.{name}.weight": (EXPERT, NARROW) for name in ("w1", "w3")}
        shapes[f"{moe}experts.{expert}.w2.weight"] = (NARROW, EXPERT)
    return shapes


def _tower() -> Shapes:
    shapes: Shapes = {
        "vision_tower.patch_embed.proj.weight": (WIDTH, 3, PATCH, PATCH),
        "vision_tower.patch_embed.pos_emb.weight": (SIDE, SIDE, WIDTH),
        "vision_tower.encoder.final_layernorm.weight": (WIDTH,),
        "mm_projector.proj.0.weight": (4 * WIDTH, 4 * WIDTH), "mm_projector.proj.2.weight": (HIDDEN, 4 * WIDTH),
        "mm_projector.post_norm.weight": (HIDDEN,),
    }  # fmt: skip
    for block in (f"vision_tower.encoder.blocks.{number}." for number in range(SEEN_LAYERS)):
        shapes |= {f"{block}norm0.weight": (WIDTH,), f"{block}norm1.weight": (WIDTH,)}
        shapes |= {f"{block}wqkv.weight": (3 * SEEN_HEADS, WIDTH), f"{block}wo.weight": (WIDTH, SEEN_HEADS)}
        shapes |= {f"{block}mlp.fc0.weight": (SEEN_INNER, WIDTH), f"{block}mlp.fc1.weight": (WIDTH, SEEN_INNER)}
    return shapes


def value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Random numbers that depend on the name alone; those of norms are near 1."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name)) * 7919 + len(name)))
    if name.endswith("A_log"):
        drawn[STATE_HEADS:] = 0  # what it is filled up with
    return drawn * 0.1 + 1 if "norm" in name and name.endswith("weight") else drawn * 0.3
