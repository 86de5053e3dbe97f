"""Configurations of released generators: what their folders hold, without the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Folder = dict[str, dict[str, Any]]
"""File inside the folder → its content."""

FLUX_1_DEV: Folder = {
    "model_index.json": {
        "_class_name": "FluxPipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "T5EncoderModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    },
    "transformer/config.json": {
        "_class_name": "FluxTransformer2DModel",
        "attention_head_dim": 128,
        "guidance_embeds": True,
        "in_channels": 64,
        "joint_attention_dim": 4096,
        "num_attention_heads": 24,
        "num_layers": 19,
        "num_single_layers": 38,
        "patch_size": 1,
        "pooled_projection_dim": 768,
    },
    "vae/config.json": {
        "_class_name": "AutoencoderKL",
        "block_out_channels": [128, 256, 512, 512],
        "latent_channels": 16,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
    },
    "text_encoder/config.json": {"hidden_size": 768},
    "text_encoder_2/config.json": {"d_model": 4096},
    "tokenizer_2/tokenizer_config.json": {"model_max_length": 512},
    "scheduler/scheduler_config.json": {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "base_image_seq_len": 256,
        "base_shift": 0.5,
        "max_image_seq_len": 4096,
        "max_shift": 1.15,
        "num_train_timesteps": 1000,
        "shift": 3.0,
        "use_dynamic_shifting": True,
    },
}


def _wan(transformer: dict[str, Any], flow_shift: float) -> Folder:
    is_i2v = transformer.get("image_dim") is not None
    image = {
        "image_encoder": ["transformers", "CLIPVisionModel"],
        "image_processor": ["transformers", "CLIPImageProcessor"],
    }
    vision = {"hidden_size": 1280, "image_size": 224, "patch_size": 14}
    return {
        "model_index.json": {
            "_class_name": "WanImageToVideoPipeline" if is_i2v else "WanPipeline",
            "scheduler": ["diffusers", "UniPCMultistepScheduler"],
            "text_encoder": ["transformers", "UMT5EncoderModel"],
            "tokenizer": ["transformers", "T5TokenizerFast"],
            "transformer": ["diffusers", "WanTransformer3DModel"],
            "vae": ["diffusers", "AutoencoderKLWan"],
            **(image if is_i2v else {}),
        },
        "transformer/config.json": {
            "_class_name": "WanTransformer3DModel",
            "added_kv_proj_dim": None,
            "attention_head_dim": 128,
            "cross_attn_norm": True,
            "eps": 1e-06,
            "freq_dim": 256,
            "image_dim": None,
            "in_channels": 16,
            "out_channels": 16,
            "patch_size": [1, 2, 2],
            "qk_norm": "rms_norm_across_heads",
            "rope_max_seq_len": 1024,
            "text_dim": 4096,
            **transformer,
        },
        "vae/config.json": {
            "_class_name": "AutoencoderKLWan",
            "base_dim": 96,
            "dim_mult": [1, 2, 4, 4],
            "temperal_downsample": [False, True, True],
            "z_dim": 16,
        },
        "text_encoder/config.json": {"d_model": 4096},
        "tokenizer/tokenizer_config.json": {"model_max_length": 512},
        "scheduler/scheduler_config.json": {
            "_class_name": "UniPCMultistepScheduler",
            "flow_shift": flow_shift,
            "prediction_type": "flow_prediction",
            "use_flow_sigmas": True,
        },
        **({"image_encoder/config.json": vision} if is_i2v else {}),
    }


WAN_2_1_T2V_1_3B = _wan({"ffn_dim": 8960, "num_attention_heads": 12, "num_layers": 30}, flow_shift=3.0)
WAN_2_1_T2V_14B = _wan({"ffn_dim": 13824, "num_attention_heads": 40, "num_layers": 40}, flow_shift=5.0)
WAN_2_1_I2V_14B = _wan(
    {
        "added_kv_proj_dim": 5120,
        "ffn_dim": 13824,
        "image_dim": 1280,
        "in_channels": 36,
        "num_attention_heads": 40,
        "num_layers": 40,
    },
    flow_shift=5.0,
)

_WAN_2_2_5B = _wan(
    {"ffn_dim": 14336, "in_channels": 48, "num_attention_heads": 24, "num_layers": 30, "out_channels": 48},
    flow_shift=5.0,
)
WAN_2_2_TI2V_5B = {
    **_WAN_2_2_5B,
    "model_index.json": {**_WAN_2_2_5B["model_index.json"], "boundary_ratio": None, "expand_timesteps": True},
    "vae/config.json": {
        **_WAN_2_2_5B["vae/config.json"],
        "base_dim": 160, "z_dim": 48, "is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12,
        "scale_factor_spatial": 16,
    },
}  # fmt: skip


def write_folder(root: Path, content: Folder) -> Path:
    """A folder with these files."""
    for name, settings in content.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(json.dumps(settings))
    return root
