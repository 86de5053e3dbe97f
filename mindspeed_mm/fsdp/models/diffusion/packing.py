"""Latents as rows of tokens, as several transformers and pipelines take them."""

from __future__ import annotations

import torch

PATCH = 2
"""Latent positions along a side of a token of FLUX and Qwen-Image, where no configuration states it."""
_OF_PICTURES = (1, PATCH, PATCH)


def pack(latents: torch.Tensor, patch: tuple[int, int, int] = _OF_PICTURES) -> torch.Tensor:
    """(B, C, H, W) or (B, C, T, H, W) → (B, tokens, C · patch): channels are outermost in a token.

    Args:
        latents: Sides are multiples of the patch.
        patch: Latent positions of a token along time, height and width.
    """
    clips = latents if latents.dim() == 5 else latents.unsqueeze(2)
    B, C, T, H, W = clips.shape
    t, h, w = patch
    patches = clips.reshape(B, C, T // t, t, H // h, h, W // w, w)
    return patches.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)


def unpack(
    tokens: torch.Tensor, latent_shape: tuple[int, ...], patch: tuple[int, int, int] = _OF_PICTURES
) -> torch.Tensor:
    """Invert `pack`: (B, tokens, C · patch) → `latent_shape`."""
    B, C, H, W = latent_shape[0], latent_shape[1], *latent_shape[-2:]
    t, h, w = patch
    patches = tokens.reshape(B, -1, H // h, W // w, C, t, h, w)
    return patches.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(latent_shape)
