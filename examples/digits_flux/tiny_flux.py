"""A FLUX.1 of 2 M parameters in diffusers' layout: configuration, word-level text encoders, no VAE to speak of.

Pixels are latents, so 8×8 pictures are 16 tokens. The transformer has no weights: training starts from scratch
(`model.train_from_scratch: true`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

prepare_for_transformers()  # its models import torchvision, which may be built for another torch

import diffusers  # noqa: E402
import torch  # noqa: E402
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel  # noqa: E402
from scans import NAMES  # noqa: E402
from transformers.utils import logging  # noqa: E402
from word_encoders import WIDTH, build_clip, build_t5, build_tokenizer  # noqa: E402

from mindspeed_mm.fsdp.models.diffusion.identity_vae import IdentityVAE  # noqa: E402

WORDS = ("a", *NAMES)
CAPTION_TOKENS = 3
"""'a seven' and its end."""
PIXEL_MEAN, PIXEL_STD = -0.39, 0.75
"""Of the scans, in −1..1."""


def write_model_folder(
    folder: Path,
    words: Sequence[str] = WORDS,
    caption_tokens: int = CAPTION_TOKENS,
    pipeline_name: str = "FluxPipeline",
    pixels: tuple[float, float] = (PIXEL_MEAN, PIXEL_STD),
) -> int:
    """Write the folder.

    Args:
        folder: Where.
        words: Of the captions.
        caption_tokens: Of the longest caption, its end included.
        pipeline_name: What the folder is for.
        pixels: Mean and deviation of the pictures, in −1..1.

    Returns:
        The transformer's number of parameters.
    """
    with torch.device("meta"):
        transformer = FluxTransformer2DModel(
            in_channels=4,  # 2×2 pixels are a token
            num_layers=2,
            num_single_layers=3,
            num_attention_heads=4,
            attention_head_dim=32,
            axes_dims_rope=(8, 12, 12),
            joint_attention_dim=WIDTH,
            pooled_projection_dim=WIDTH,
        )
    tokenizer = build_tokenizer(words, caption_tokens + 1, starts=True)
    tokenizer_2 = build_tokenizer(words, caption_tokens, starts=False)
    pipeline = getattr(diffusers, pipeline_name)(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=IdentityVAE(latent_channels=1, shift_factor=pixels[0], scaling_factor=1 / pixels[1]),
        text_encoder=build_clip(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=build_t5(tokenizer_2),
        tokenizer_2=tokenizer_2,
        transformer=transformer,
    )
    save_without_weights(pipeline, folder)
    return sum(parameter.numel() for parameter in transformer.parameters())


def save_without_weights(pipeline: Any, folder: Path) -> None:
    """Write a pipeline's folder; of its transformer the configuration only."""
    logging.disable_progress_bar()
    pipeline.save_config(folder)
    for name, component in pipeline.components.items():
        if name == "transformer":
            component.save_config(folder / name)
        elif component is not None:
            component.save_pretrained(folder / name)
