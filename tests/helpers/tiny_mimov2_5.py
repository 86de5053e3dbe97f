"""A tiny folder of MiMo-V2.5, written as the released one is, by hand and without the code under test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.helpers.tiny_processors import byte_tokenizer

Shapes = dict[str, tuple[int, ...]]

HIDDEN, INNER, HEADS, GROUPS, HEAD, VALUE, EXPERTS, CHOSEN = 32, 48, 4, 2, 12, 6, 4, 2
KINDS, ROUTED, WINDOW, TURNED = (0, 1, 1), (0, 1, 1), 5, 4
"""Of each layer, 1 where it has a window and twice as many groups of keys; 1 where it has experts. Features of a head
that are turned by its place: a third of them."""
SEE, SEE_INNER, SEE_HEADS, SEE_GROUPS, SEE_HEAD, PATCH, REACH = 24, 40, 4, 2, 8, 4, 3
SEE_KINDS, SEE_ALL = (-1, 0, 1, 1, 0, -1), (0, 5)
CODEBOOKS, GROUP, LOCAL, LOCAL_HEADS, LOCAL_INNER, LOCAL_LAYERS, ROWS = 3, 4, 16, 2, 24, 2, 40
FURTHER = 3
"""Heads for further tokens that the folder has."""
SOUND = {
    "d_model": 16, "encoder_layers": 3, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "n_mels": 8,
    "kernel_size": 3, "stride_size": 2, "avg_pooler": 2, "encoder_skip_layer_id": 2, "encoder_causal": True,
    "encoder_attn_window_size": [6, 0], "hybrid_attention": True, "swa_per_block": 2, "rope_theta": 10000,
    "num_quantizers": CODEBOOKS, "codebook_size": [32, 16, 8], "sampling_rate": 24000, "hop_length": 240, "nfft": 960,
    "window_size": 960, "fmin": 0, "fmax": None, "ln_type": "LayerNorm", "activation_function": "gelu",
}  # fmt: skip
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif part.type == 'audio' %}{{ '<|mimo_audio_start|><|audio_pad|><|mimo_audio_end|>' }}
{%- elif part.type == 'text' %}{{ part.text }}{% endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""
MARKS = {
    "image": "<|image_pad|>", "video": "<|video_pad|>", "audio": "<|audio_pad|>",
    "vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>",
    "video_start": "<|mimo_video_start|>", "video_end": "<|mimo_video_end|>",
    "audio_start": "<|mimo_audio_start|>", "audio_end": "<|mimo_audio_end|>",
}  # fmt: skip
_SPECIAL = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "turn_token": "<|im_start|>"}


def make_tiny_mimov2_5(folder: Path) -> dict[str, torch.Tensor]:
    """Write the folder; the tensors that it holds, by their released names."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer(_SPECIAL | {f"{name}_mark": token for name, token in MARKS.items()}, TEMPLATE)
    tokenizer.save_pretrained(folder)
    words = len(tokenizer) + 2 + len(tokenizer) % 2
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in MARKS.items()}
    config = _settings(words, ids)
    config |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    # As released, it names the processor of another family, and other bounds than config.json.
    pictures = {"min_pixels": 4, "max_pixels": 400, "patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2}
    pictures |= {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
    pictures |= {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
    sound = folder / "audio_tokenizer"
    sound.mkdir(exist_ok=True)
    for path, content in (
        (folder / "config.json", config),
        (folder / "preprocessor_config.json", pictures),
        (sound / "config.json", SOUND),
    ):
        path.write_text(json.dumps(content), encoding="utf-8")
    tensors = {name: value(name, shape) for name, shape in released_shapes(words).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file({name: value(name, shape) for name, shape in sound_shapes().items()}, sound / "model.safetensors")
    return tensors


def _settings(words: int, ids: dict[str, int]) -> dict[str, Any]:
    vision = {
        "depth": len(SEE_KINDS), "hidden_size": SEE, "intermediate_size": SEE_INNER, "num_heads": SEE_HEADS,
        "num_key_value_heads": SEE_GROUPS, "num_query_groups": 4, "qk_channels": SEE_HEAD, "out_hidden_size": HIDDEN,
        "in_chans": 3, "patch_size": PATCH, "spatial_patch_size": PATCH, "temporal_patch_size": 2,
        "spatial_merge_size": 2, "tokens_per_second": 2, "fullatt_block_indexes": list(SEE_ALL), "window_size": 128,
        "vit_window_attn_types": list(SEE_KINDS), "visual_token_window_size": REACH, "use_sink": True,
        "hidden_act": "silu",
    }  # fmt: skip
    audio = {
        "audio_channels": CODEBOOKS, "group_size": GROUP, "input_local_dim": LOCAL, "input_local_layers": LOCAL_LAYERS,
        "input_local_attn_heads": LOCAL_HEADS, "input_local_head_dim": LOCAL // LOCAL_HEADS,
        "input_local_intermediate_size": LOCAL_INNER, "out_hidden_size": HIDDEN, "projection_layers": 2,
        "rope_theta": 640000, "add_post_norm": True, "input_full_attention": True, "partial_rotary_factor": 1.0,
        "speech_vocab_size": f"{ROWS}", "speech_zeroemb_idx": "32", "audio_segment_size": 40,
    }  # fmt: skip
    processor = {
        "image_min_pixels": 64, "image_max_pixels": 1024, "video_min_pixels": 64, "video_max_pixels": 1024,
        "audio_sampling_rate": 24000, "audio_group_size": GROUP, "audio_segment_size": 40,
    }  # fmt: skip
    return {
        "architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2", "dtype": "float32",
        "auto_map": {"AutoConfig": "configuration_mimo_v2.MiMoV2Config"}, "vocab_size": words,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": len(KINDS),
        "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": HEAD, "v_head_dim": VALUE,
        "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": 2 * GROUPS, "swa_head_dim": HEAD,
        "swa_v_head_dim": VALUE, "hidden_act": "silu", "max_position_embeddings": 4096, "initializer_range": 0.02,
        "layernorm_epsilon": 1e-5, "rope_theta": 10000000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.334,
        "rope_scaling": {"rope_type": "default", "type": "default"}, "sliding_window": WINDOW,
        "sliding_window_size": WINDOW, "attention_chunk_size": WINDOW, "attention_bias": False,
        "attention_value_scale": 0.707, "attention_projection_layout": "fused_qkv",
        "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True, "hybrid_block_size": None,
        "hybrid_layer_pattern": list(KINDS), "moe_layer_freq": list(ROUTED), "moe_intermediate_size": 24,
        "n_routed_experts": EXPERTS, "n_shared_experts": None, "num_experts_per_tok": CHOSEN, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": None, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "tie_word_embeddings": False, "vision_model_type": "mimovl",
        **{f"{name}_token_id": ids[f"{name}_token_id"] for name in ("image", "video", "vision_start", "vision_end")},
        "vision_config": vision, "audio_config": audio, "processor_config": processor | ids,
    }  # fmt: skip


def rows_of_attention(windowed: bool) -> tuple[int, int, int]:
    """Rows of the one matrix that are of queries, keys and values."""
    groups = GROUPS * (2 if windowed else 1)
    return HEADS * HEAD, groups * HEAD, groups * VALUE


def released_shapes(words: int) -> Shapes:
    """Every name of the release with its shape, written out by hand."""
    shapes: Shapes = {"model.embed_tokens.weight": (words, HIDDEN), "lm_head.weight": (words, HIDDEN)}
    shapes["model.norm.weight"] = (HIDDEN,)
    for number, (windowed, routed) in enumerate(zip(KINDS, ROUTED, strict=True)):
        layer = f"model.layers.{number}"
        shapes |= {f"{layer}.{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= _attention(layer, bool(windowed))
        if not routed:
            shapes |= _gated(f"{layer}.mlp", HIDDEN, INNER)
            continue
        shapes |= {f"{layer}.mlp.gate.weight": (EXPERTS, HIDDEN)}
        shapes |= {f"{layer}.mlp.gate.e_score_correction_bias": (EXPERTS,)}
        for expert in range(EXPERTS):
            shapes |= _gated(f"{layer}.mlp.experts.{expert}", HIDDEN, 24)
    for number in range(FURTHER):
        layer = f"model.mtp.layers.{number}"
        norms = ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm")
        shapes |= {f"{layer}.{name}.weight": (HIDDEN,) for name in norms}
        shapes |= {f"{layer}.eh_proj.weight": (HIDDEN, 2 * HIDDEN)}
        shapes |= _attention(layer, windowed=True) | _gated(f"{layer}.mlp", HIDDEN, INNER)
    return shapes | _towers()


def _attention(layer: str, windowed: bool) -> Shapes:
    shapes: Shapes = {
        f"{layer}.self_attn.qkv_proj.weight": (sum(rows_of_attention(windowed)), HIDDEN),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * VALUE),
    }
    return shapes | ({f"{layer}.self_attn.attention_sink_bias": (HEADS,)} if windowed else {})


def _gated(name: str, width: int, inner: int, bias: bool = False) -> Shapes:
    sizes = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
    shapes: Shapes = {f"{name}.{part}.weight": size for part, size in sizes.items()}
    return shapes | ({f"{name}.{part}.bias": size[:1] for part, size in sizes.items()} if bias else {})


def _towers() -> Shapes:
    wide = 4 * SEE
    shapes: Shapes = {
        "visual.patch_embed.proj.weight": (SEE, 3, 2, PATCH, PATCH),
        "visual.merger.ln_q.weight": (SEE,),
        "visual.merger.mlp.0.weight": (wide, wide),
        "visual.merger.mlp.2.weight": (HIDDEN, wide),
        "audio_encoder.projection.mlp.0.weight": (4 * LOCAL * GROUP, LOCAL * GROUP),
        "audio_encoder.projection.mlp.2.weight": (HIDDEN, 4 * LOCAL * GROUP),
        "audio_encoder.input_local_transformer.norm.weight": (LOCAL,),
    }
    shapes |= {f"speech_embeddings.{number}.weight": (ROWS, LOCAL) for number in range(CODEBOOKS)}
    for number in range(len(SEE_KINDS)):
        block, rows = f"visual.blocks.{number}", (SEE_HEADS + 2 * SEE_GROUPS) * SEE_HEAD
        shapes |= {f"{block}.norm1.weight": (SEE,), f"{block}.norm2.weight": (SEE,)}
        shapes |= {f"{block}.attn.qkv.weight": (rows, SEE), f"{block}.attn.qkv.bias": (rows,)}
        shapes |= {f"{block}.attn.proj.weight": (SEE, SEE_HEADS * SEE_HEAD), f"{block}.attn.proj.bias": (SEE,)}
        shapes |= _gated(f"{block}.mlp", SEE, SEE_INNER, bias=True)
        if number not in SEE_ALL:
            shapes[f"{block}.attn.sinks"] = (SEE_HEADS,)
    for number in range(LOCAL_LAYERS):
        layer = f"audio_encoder.input_local_transformer.layers.{number}"
        shapes |= {f"{layer}.{name}.weight": (LOCAL,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (LOCAL, LOCAL) for name in "qkvo"}
        shapes |= {f"{layer}.self_attn.{name}_proj.bias": (LOCAL,) for name in "qkv"}
        shapes |= _gated(f"{layer}.mlp", LOCAL, LOCAL_INNER)
    return shapes


def sound_shapes() -> Shapes:
    """Of the encoder that makes codes; what follows it in the released file is not read."""
    width: int = SOUND["d_model"]  # type: ignore[assignment]
    inner: int = SOUND["encoder_ffn_dim"]  # type: ignore[assignment]
    shapes: Shapes = {
        "encoder.conv1.weight": (width, 8, 3), "encoder.conv1.bias": (width,),
        "encoder.conv2.weight": (width, width, 3), "encoder.conv2.bias": (width,),
        "encoder.down_sample_layer.0.weight": (width, width, 2), "decoder.layers.0.fc1.weight": (4, 4),
    }  # fmt: skip
    norms = ["encoder.layer_norm", "encoder.down_sample_norm"]
    for layer in (f"encoder.layers.{number}" for number in range(3)):
        norms += [f"{layer}.self_attn_layer_norm", f"{layer}.final_layer_norm"]
        shapes |= {f"{layer}.self_attn.{name}.weight": (width, width) for name in ("k_proj", "v_proj", "q_proj")}
        shapes |= {f"{layer}.self_attn.{name}.bias": (width,) for name in ("v_proj", "q_proj", "out_proj")}
        shapes |= {f"{layer}.self_attn.out_proj.weight": (width, width), f"{layer}.fc1.bias": (inner,)}
        shapes |= {f"{layer}.fc1.weight": (inner, width), f"{layer}.fc2.weight": (width, inner)}
        shapes |= {f"{layer}.fc2.bias": (width,)}
    shapes |= {f"{norm}.{kind}": (width,) for norm in norms for kind in ("weight", "bias")}
    sizes: list[int] = SOUND["codebook_size"]  # type: ignore[assignment]
    for number, size in enumerate(sizes):
        book = f"encoder.quantizer.vq.layers.{number}._codebook"
        shapes |= {f"{book}.embed": (size, width), f"{book}.embed_avg": (size, width)}
        shapes |= {f"{book}.cluster_size": (size,), f"{book}.inited": (1,)}
    return shapes


def value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Random numbers that depend on the name alone; those of norms are near 1."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name)) * 7919 + len(name)))
    return drawn * 0.1 + 1 if ("norm" in name or ".ln_" in name) and name.endswith("weight") else drawn * 0.3
