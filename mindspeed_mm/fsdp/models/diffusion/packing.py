"""Latents as tokens of 2 × 2 positions, as the FLUX and Qwen-Image transformers take them."""

from __future__ import annotations

import torch

PATCH = 2
"""Latent positions along a side of a token; not in any configuration."""


def pack(latents_BCHW: torch.Tensor) -> torch.Tensor:
    """(B, C, H, W) → (B, H/2 · W/2, 4C): a token holds 2 × 2 positions, channels outermost."""
    B, C, H, W = latents_BCHW.shape
    patches = latents_BCHW.reshape(B, C, H // PATCH, PATCH, W // PATCH, PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(B, (H // PATCH) * (W // PATCH), C * PATCH**2)


def unpack(tokens_BNC: torch.Tensor, latent_shape: tuple[int, ...]) -> torch.Tensor:
    """(B, H/2 · W/2, 4C) → (B, C, H, W)."""
    B, C, H, W = latent_shape
    patches = tokens_BNC.reshape(B, H // PATCH, W // PATCH, C, PATCH, PATCH)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(B, C, H, W)
