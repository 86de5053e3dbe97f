"""Folders of Open-Sora Plan in diffusers' layout, small enough for a test: blocks with attention of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.tiny_generators import (
    TEXT_WIDTH,
    clip_text_config,
    clip_tokenizer,
    seeded,
    t5_config,
    t5_tokenizer,
)

TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "num_layers": 4,
    "cross_attention_dim": 24, "attention_bias": True, "patch_size": 2, "patch_size_t": 1,
    "activation_fn": "gelu-approximate", "caption_channels": TEXT_WIDTH, "sparse1d": True, "sparse_n": 2,
}  # fmt: skip
"""Blocks 2 and 3 attend sparsely, in both ways."""
JOINT: dict[str, Any] = {
    "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "num_layers": [2, 2, 2],
    "sparse_n": [1, 2, 1], "caption_channels": TEXT_WIDTH, "pooled_projection_dim": 24, "timestep_embed_dim": 16,
}  # fmt: skip
"""Of 1.5: the stage in the middle attends sparsely, in both ways."""
VAE: dict[str, Any] = {
    "latent_dim": 4, "base_channels": 4, "encoder_num_resblocks": 1, "decoder_num_resblocks": 1,
    "encoder_energy_flow_hidden_size": 4, "decoder_energy_flow_hidden_size": 4, "norm_type": "layernorm",
    "t_interpolation": "trilinear", "scale": [0.5, 0.7, 0.9, 1.1], "shift": [0.1, -0.2, 0.3, 0.0],
}  # fmt: skip


def make_tiny_opensoraplan(folder: Path, task: str = "t2v", **transformer: Any) -> None:
    """Height and width are multiples of 16, frames 4k + 1."""
    from diffusers import EulerAncestralDiscreteScheduler
    from transformers import MT5EncoderModel

    from mindspeed_mm.fsdp.models.opensoraplan import pipeline, transformer_1_3, wf_vae

    t5 = t5_tokenizer()
    is_t2v = task == "t2v"
    model = transformer_1_3.OpenSoraT2V_v1_3 if is_t2v else transformer_1_3.OpenSoraInpaint_v1_3
    whole = pipeline.OpenSoraPipeline if is_t2v else pipeline.OpenSoraInpaintPipeline
    steps = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    made = seeded(lambda: model(**{**TRANSFORMER, **transformer}), 2)
    for name, parameter in made.named_parameters():
        if name.startswith("pos_embed_") and name.endswith("1.weight"):  # zeros before anything is learned
            parameter.data.normal_(std=0.2)
    whole(
        tokenizer=t5,
        text_encoder=seeded(lambda: MT5EncoderModel(t5_config(t5)), 0),
        vae=seeded(lambda: wf_vae.WFVAEModel(**VAE), 1),
        transformer=made,
        scheduler=EulerAncestralDiscreteScheduler(**steps),
    ).save_pretrained(folder)


TIME_TOO = {
    "l1_dowmsample_block": "Spatial2xTime2x3DDownsample", "l1_downsample_wavelet": "HaarWaveletTransform3D",
    "l1_upsample_block": "Spatial2xTime2x3DUpsample", "l1_upsample_wavelet": "InverseHaarWaveletTransform3D",
}  # fmt: skip
"""What the VAE of 1.5 (8×8×8) has beyond that of 1.3 (4×8×8)."""


def make_tiny_opensoraplan_1_5(folder: Path, **settings: Any) -> None:
    """Height and width are multiples of 16, frames 8k + 1. `settings` are of the pipeline."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from transformers import CLIPTextModelWithProjection, T5EncoderModel

    from mindspeed_mm.fsdp.models.opensoraplan import pipeline, transformer_1_5, wf_vae

    t5, clip = t5_tokenizer(), clip_tokenizer()
    config = clip_text_config(clip, projection_dim=24)
    pipeline.OpenSoraJointPipeline(
        tokenizer=t5,
        text_encoder=seeded(lambda: T5EncoderModel(t5_config(t5)), 0),
        tokenizer_2=clip,
        text_encoder_2=seeded(lambda: CLIPTextModelWithProjection(config), 3),
        vae=seeded(lambda: wf_vae.WFVAEModel(**VAE, **TIME_TOO), 1),
        transformer=seeded(lambda: transformer_1_5.OpenSoraT2V_v1_5(**JOINT), 2),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        **settings,
    ).save_pretrained(folder)
