"""A tiny folder of Stable Diffusion 3 without the T5 encoder."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

T5_TOKENS = 8
CLIP_WIDTH = 16


def make_tiny_sd3(folder: Path) -> Path:
    """A folder without `text_encoder_3` and `tokenizer_3`; sides are multiples of 4."""
    prepare_for_transformers()
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import CLIPTextModelWithProjection

    from tests.helpers.tiny_generators import FLUX_VAE, clip_text_config, clip_tokenizer, seeded

    tokenizer = clip_tokenizer()
    config = clip_text_config(tokenizer, hidden_size=CLIP_WIDTH, projection_dim=CLIP_WIDTH, num_hidden_layers=2)
    transformer = {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2,
        "attention_head_dim": 8, "num_attention_heads": 4, "caption_projection_dim": 32,
        "joint_attention_dim": 2 * CLIP_WIDTH, "pooled_projection_dim": 2 * CLIP_WIDTH, "pos_embed_max_size": 16,
    }  # fmt: skip
    StableDiffusion3Pipeline(
        transformer=seeded(lambda: SD3Transformer2DModel(**transformer), 0),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=seeded(lambda: AutoencoderKL(**FLUX_VAE), 1),
        text_encoder=seeded(lambda: CLIPTextModelWithProjection(config), 2),
        tokenizer=tokenizer,
        text_encoder_2=seeded(lambda: CLIPTextModelWithProjection(config), 3),
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    ).save_pretrained(folder)
    return folder
