"""Pixels as encoders take them, from uint8; the same arithmetic as diffusers' image processor, to the bit."""

from __future__ import annotations

import torch
from PIL import Image


def model_range(pixels: torch.Tensor) -> torch.Tensor:
    """uint8 → fp32 in −1..1."""
    return 2.0 * (pixels.float() / 255.0) - 1.0


def as_bytes(pixels: torch.Tensor) -> torch.Tensor:
    """Turn values in −1..1 into uint8, rounded; values outside the range are clipped."""
    return ((pixels.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)


def as_pil(pixels: torch.Tensor) -> list[Image.Image]:
    """(B, 3, H, W) uint8 → images."""
    return [Image.fromarray(image) for image in pixels.permute(0, 2, 3, 1).cpu().numpy()]
