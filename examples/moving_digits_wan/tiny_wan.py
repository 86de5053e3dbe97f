"""A Wan2.1 of 1 M parameters in diffusers' layout: configuration, word-level text encoder, no VAE to speak of.

Pixels are latents, and a quarter of a frame is a token: 5 frames of 16×16 are 20 tokens. The transformer has no
weights: training starts from scratch (`model.train_from_scratch: true`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

prepare_for_transformers()  # its models import torchvision, which may be built for another torch

import diffusers  # noqa: E402
import torch  # noqa: E402
from clips import CANVAS, DIRECTIONS, FRAMES  # noqa: E402  (first of the examples': it finds the other one)
from diffusers import UniPCMultistepScheduler, WanTransformer3DModel  # noqa: E402
from scans import NAMES, SIDE  # noqa: E402
from tiny_flux import save_without_weights  # noqa: E402
from word_encoders import WIDTH, build_tokenizer, build_umt5  # noqa: E402

from mindspeed_mm.fsdp.models.diffusion.identity_vae import IdentityVAE  # noqa: E402

WORDS = ("a", "moving", *DIRECTIONS, *NAMES)
CAPTION_TOKENS = 5
"""'a seven moving left' and its end."""
PIXEL_MEAN, PIXEL_STD = -0.84, 0.5
"""Of the clips, in −1..1."""
FLOW_SHIFT = 5.0
"""More steps, in training and in sampling, at high noise: there the motion is decided. With 1 it stays at chance."""


def write_model_folder(
    folder: Path,
    flow_shift: float = FLOW_SHIFT,
    words: Sequence[str] = WORDS,
    caption_tokens: int = CAPTION_TOKENS,
    pipeline_name: str = "WanPipeline",
    given_channels: int = 0,
) -> int:
    """Write the folder.

    Args:
        folder: Where.
        flow_shift: Of the scheduler.
        words: Of the captions.
        caption_tokens: Of the longest caption, its end included.
        pipeline_name: What the folder is for.
        given_channels: What the transformer is given beside the noise; with a first frame its mask and itself, 2.

    Returns:
        The transformer's number of parameters.
    """
    with torch.device("meta"):
        transformer = WanTransformer3DModel(
            patch_size=(1, SIDE, SIDE),
            in_channels=1 + given_channels,
            out_channels=1,
            num_layers=4,
            num_attention_heads=4,
            attention_head_dim=32,
            ffn_dim=256,
            freq_dim=64,
            text_dim=WIDTH,
            rope_max_seq_len=max(CANVAS, FRAMES),
        )
    tokenizer = build_tokenizer(words, caption_tokens, starts=False)
    pipeline = getattr(diffusers, pipeline_name)(
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift, num_train_timesteps=1000
        ),
        vae=IdentityVAE(latent_channels=1, video=True, latents_mean=(PIXEL_MEAN,), latents_std=(PIXEL_STD,)),
        text_encoder=build_umt5(tokenizer),
        tokenizer=tokenizer,
        transformer=transformer,
    )
    save_without_weights(pipeline, folder)
    return sum(parameter.numel() for parameter in transformer.parameters())
