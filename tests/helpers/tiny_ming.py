"""A tiny folder of Ming-Lite-Omni, of version 1.5 or of the preview, written as the released ones are, by hand and
without the code under test."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.helpers.tiny_processors import byte_tokenizer

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 32, 2, 1, 128
EXPERT, EXPERTS, CHOSEN, SHARED = 16, 6, 2, 2
LAYERS = 2
WIDTH, HEADS_SEE, INNER_SEE, PATCH, BLOCKS, OUT = 24, 2, 36, 4, 2, 40
"""Of the tower of pictures: features, heads, inner features, pixels of a patch, blocks, features that it hands on."""
MELS, HEARD, HEADS_HEAR, PLACES = 8, 16, 2, 150
"""Of the encoder of sounds: bands, features, heads, and places of Whisper's."""
JOINED, STEP = 3, 2
"""Frames of a sound that become one of the preview's, and how far these are apart."""
_MARKS = (
    *("role", "/role", "imagePatch", "image", "/image", "video", "/video", "audioPatch", "audio", "/audio"),
    *("gen_image", "/gen_image"),
)


def make_tiny_ming(folder: Path, layers: int = LAYERS, *, preview: bool = False) -> dict[str, torch.Tensor]:
    """Write the folder; the tensors that it holds, by their released names. Those of the model that speaks are beside
    them."""
    folder.mkdir(parents=True)
    special = {f"mark{number}_token": f"<{mark}>" for number, mark in enumerate(_MARKS)}
    tokenizer = byte_tokenizer({"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"} | special, None)
    tokenizer.save_pretrained(folder)
    ids = {mark: tokenizer.convert_tokens_to_ids(f"<{mark}>") for mark in _MARKS}
    language = {
        "model_type": "bailing_moe", "architectures": ["BailingMoeForCausalLM"], "hidden_size": HIDDEN,
        "intermediate_size": 40, "num_hidden_layers": layers, "num_attention_heads": HEADS, "head_dim": HEAD_DIM,
        "num_key_value_heads": KV_HEADS, "moe_intermediate_size": EXPERT, "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN, "num_shared_experts": SHARED, "norm_topk_prob": True, "multi_gate": True,
        "norm_head": preview, "hidden_act": "silu", "first_k_dense_replace": 0, "use_bias": False,
        "use_qkv_bias": False, "rms_norm_eps": 1e-5, "rope_theta": 600000.0, "max_position_embeddings": 4096,
        "rope_scaling": None if preview else {"type": "3D", "factor": None}, "tie_word_embeddings": False,
        "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        "image_patch_token": ids["imagePatch"], "image_start_token": ids["image"], "video_start_token": ids["video"],
        "_attn_implementation": "flash_attention_2", "torch_dtype": "float32",
    }  # fmt: skip
    vision = {
        "model_type": "qwen2_5_vit", "attn_implementation": "flash_attention_2", "depth": BLOCKS,
        "hidden_size": WIDTH, "num_heads": HEADS_SEE, "intermediate_size": INNER_SEE, "patch_size": PATCH,
        "spatial_patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
        "in_chans": 3, "window_size": 4 * PATCH, "fullatt_block_indexes": [1], "out_hidden_size": OUT,
        "hidden_act": "silu", "tokens_per_second": 2,
    }  # fmt: skip
    whisper = {"n_mels": MELS, "n_ctx": PLACES, "n_state": HEARD, "n_head": HEADS_HEAR, "n_layer": 2}
    sanm = {
        "input_size": MELS * JOINED, "output_size": HEARD, "attention_heads": HEADS_HEAR, "linear_units": 20,
        "num_blocks": 3, "dropout_rate": 0.0, "positional_dropout_rate": 0.0, "attention_dropout_rate": 0.0,
        "input_layer": "pe", "pos_enc_class": "SinusoidalPositionEncoder", "normalize_before": True, "kernel_size": 5,
        "sanm_shfit": 0, "selfattention_layer_type": "sanm",
    }  # fmt: skip
    hears: dict[str, object] = {"norm_query_embeds": True, "ds_kernel_size": 3, "ds_stride": 2}
    hears |= {"whisper_encoder_config": whisper}
    if preview:
        hears = {"audio_encoder_config_sanm": sanm, "audio_encoder_output_size": HEARD}
        hears |= {"ds_kernel_size": 1, "ds_stride": 1}
    config = {
        "architectures": ["BailingMMNativeForConditionalGeneration"], "model_type": "bailingmm", "mlp_depth": 2,
        "llm_config": language, "vision_config": vision, "audio_config": hears, "torch_dtype": "float32",
        "talker_config": {"model_type": "", "vocab_size": 64},
    }  # fmt: skip
    frames = {"n_mels": MELS, "frame_length": 25, "frame_shift": 10, "lfr_m": JOINED, "lfr_n": STEP, "fs": 16000}
    frames |= {"cmvn_file": "am.mvn", "window": "hamming"}
    processing = {
        "auto_map": {"AutoProcessor": "processing_bailingmm.BailingMMProcessor"}, "min_pixels": 64,
        "max_pixels": 1024, "min_pixels_video": 64, "max_pixels_video": 512, "patch_size": PATCH,
        "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711], "image_processor_type": "BailingMMImageProcessor",
        "audio_processor_type": "BailingMMAudioProcessor", "processor_class": "BailingMMProcessor",
        "sampling_rate": 16000, "wav_frontend_args": frames,
    }  # fmt: skip
    if not preview:
        processing["whisper_frontend_args"] = {"n_mels": MELS}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processing))
    width = MELS * JOINED
    means, scales = ([f"{sign * (at + 1) / width:.3f}" for at in range(width)] for sign in (-1, 1))
    parts = [f"<AddShift> {width} {width}", f"<LearnRateCoef> 0 [ {' '.join(means)} ]"]
    parts += [f"<Rescale> {width} {width}", f"<LearnRateCoef> 0 [ {' '.join(scales)} ]"]
    (folder / "am.mvn").write_text("\n".join(["<Nnet>", *parts, "</Nnet>"]))
    shapes = released_shapes(len(tokenizer), layers, preview=preview) | {"talker.proj.weight": (4, HIDDEN)}
    tensors = {name: _value(name, shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def released_shapes(vocabulary: int, layers: int, *, preview: bool = False) -> dict[str, tuple[int, ...]]:
    """Every name of the release with its shape, written out by hand."""
    shapes: dict[str, tuple[int, ...]] = {"vision.patch_embed.proj.weight": (WIDTH, 3, 2, PATCH, PATCH)}

    def linear(name: str, out: int, inner: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (out, inner), (out,)

    def norm(name: str, width: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (width,), (width,)

    for block in (f"vision.blocks.{number}" for number in range(BLOCKS)):
        shapes |= {f"{block}.norm1.weight": (WIDTH,), f"{block}.norm2.weight": (WIDTH,)}
        linear(f"{block}.attn.qkv", 3 * WIDTH, WIDTH)
        linear(f"{block}.attn.proj", WIDTH, WIDTH)
        linear(f"{block}.mlp.gate_proj", INNER_SEE, WIDTH)
        linear(f"{block}.mlp.up_proj", INNER_SEE, WIDTH)
        linear(f"{block}.mlp.down_proj", WIDTH, INNER_SEE)
    shapes["vision.merger.ln_q.weight"] = (WIDTH,)
    linear("vision.merger.mlp.0", 4 * WIDTH, 4 * WIDTH)
    linear("vision.merger.mlp.2", OUT, 4 * WIDTH)
    linear("linear_proj.0", HIDDEN, OUT)
    linear("linear_proj.2", HIDDEN, HIDDEN)
    shapes |= {
        "linear_proj_audio.0.weight": (HIDDEN, HEARD, 1 if preview else 3),
        "linear_proj_audio.0.bias": (HIDDEN,),
    }
    linear("linear_proj_audio.3", HIDDEN, HIDDEN)
    if preview:
        for layer, width in (("encoders0.0", MELS * JOINED), ("encoders.0", HEARD), ("encoders.1", HEARD)):
            norm(f"audio.{layer}.norm1", width)
            norm(f"audio.{layer}.norm2", HEARD)
            linear(f"audio.{layer}.self_attn.linear_q_k_v", 3 * HEARD, width)
            linear(f"audio.{layer}.self_attn.linear_out", HEARD, HEARD)
            shapes[f"audio.{layer}.self_attn.fsmn_block.weight"] = (HEARD, 1, 5)
            linear(f"audio.{layer}.feed_forward.w_1", 20, HEARD)
            linear(f"audio.{layer}.feed_forward.w_2", HEARD, 20)
        norm("audio.after_norm", HEARD)
    else:
        shapes |= {"audio.positional_embedding": (PLACES, HEARD), "audio.conv1.weight": (HEARD, MELS, 3)}
        shapes |= {"audio.conv1.bias": (HEARD,), "audio.conv2.weight": (HEARD, HEARD, 3), "audio.conv2.bias": (HEARD,)}
        for block in ("audio.blocks.0", "audio.blocks.1"):
            for name in ("query", "value", "out"):
                linear(f"{block}.attn.{name}", HEARD, HEARD)
            shapes[f"{block}.attn.key.weight"] = (HEARD, HEARD)
            norm(f"{block}.attn_ln", HEARD)
            linear(f"{block}.mlp.0", 4 * HEARD, HEARD)
            linear(f"{block}.mlp.2", HEARD, 4 * HEARD)
            norm(f"{block}.mlp_ln", HEARD)
        norm("audio.ln_post", HEARD)
    shapes |= {"model.model.word_embeddings.weight": (vocabulary, HIDDEN), "model.lm_head.weight": (vocabulary, HIDDEN)}
    shapes["model.model.norm.weight"] = (HIDDEN,)
    for layer in (f"model.model.layers.{number}" for number in range(layers)):
        own: dict[str, tuple[int, ...]] = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "attention.query_key_value": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            "attention.dense": (HIDDEN, HEADS * HEAD_DIM),
        }
        own |= {f"mlp.{gate}": (EXPERTS, HIDDEN) for gate in ("gate", "image_gate", "audio_gate")}
        parts = {"shared_experts": SHARED * EXPERT} | {f"experts.{expert}": EXPERT for expert in range(EXPERTS)}
        for part, inner in parts.items():
            own |= {f"mlp.{part}.{name}_proj": (inner, HIDDEN) for name in ("gate", "up")}
            own[f"mlp.{part}.down_proj"] = (HIDDEN, inner)
        shapes |= {f"{layer}.{name}.weight": shape for name, shape in own.items()}
    return shapes


def _value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name)) * 7919 + len(name)))
    is_norm = "norm" in name or name.endswith(("_ln.weight", "ln_q.weight", "ln_post.weight"))
    return drawn * 0.1 + 1 if is_norm and name.endswith("weight") else drawn * 0.3
