"""How VAEs' latents are brought to mean 0 and variance 1: by one number, or channel by channel.

Computed in fp32 at least, given back in the type of the latents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mindspeed_mm.fsdp.models.diffusion.pixels import model_range

if TYPE_CHECKING:
    from diffusers import ModelMixin


def posterior_mode(vae: ModelMixin, pixels: torch.Tensor) -> torch.Tensor:
    """The mode of a VAE's posterior for uint8 pixels: (B, 3, T, H, W), or (B, 3, H, W) for VAEs of images."""
    return vae.encode(model_range(pixels).to(vae.device, vae.dtype)).latent_dist.mode()


def scaled(vae: ModelMixin, latents: torch.Tensor) -> torch.Tensor:
    """(z − shift_factor) · scaling_factor, from the VAE's configuration; no shift where it has none."""
    shift = vae.config.get("shift_factor") or 0.0
    return ((_exact(latents) - shift) * vae.config.scaling_factor).to(latents.dtype)


def unscaled(vae: ModelMixin, latents: torch.Tensor) -> torch.Tensor:
    """Invert `scaled`: z / scaling_factor + shift_factor, in the type of the latents."""
    shift = vae.config.get("shift_factor") or 0.0
    return (_exact(latents) / vae.config.scaling_factor + shift).to(latents.dtype)


def standardised(
    latents: torch.Tensor, mean: Sequence[float] | torch.Tensor, std: Sequence[float] | torch.Tensor
) -> torch.Tensor:
    """(z − mean) / std by channel, the second axis.

    Args:
        latents: (B, C, …).
        mean: (C,).
        std: (C,).
    """
    exact, mean, std = _of_channels(latents, mean, std)
    return ((exact - mean) / std).to(latents.dtype)


def unstandardised(
    latents: torch.Tensor, mean: Sequence[float] | torch.Tensor, std: Sequence[float] | torch.Tensor
) -> torch.Tensor:
    """Invert `standardised`: z · std + mean by channel, in the type of the latents."""
    exact, mean, std = _of_channels(latents, mean, std)
    return (exact * std + mean).to(latents.dtype)


def _of_channels(
    latents: torch.Tensor, *numbers: Sequence[float] | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents and two numbers a channel, to be computed with each other."""
    exact, shape = _exact(latents), (1, -1, *[1] * (latents.dim() - 2))
    mean, std = (torch.as_tensor(each, device=exact.device, dtype=exact.dtype).view(shape) for each in numbers)
    return exact, mean, std


def _exact(latents: torch.Tensor) -> torch.Tensor:
    return latents.to(torch.promote_types(latents.dtype, torch.float32))
