"""How a VAE's latents are brought to mean 0 and variance 1: by one number, or channel by channel.

Computed in fp32 at least, and returned in the type of the latents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from typing_extensions import override

from mindspeed_mm.fsdp.models.diffusion.pixels import model_range

if TYPE_CHECKING:
    from diffusers import ModelMixin

Numbers: TypeAlias = Sequence[float] | torch.Tensor
"""One number for each channel, (C,)."""


def posterior_mode(vae: ModelMixin, media: torch.Tensor) -> torch.Tensor:
    """The mode of a VAE's posterior, or what a VAE without one encodes.

    Args:
        vae: Of a pipeline.
        media: (B, 3, T, H, W), or (B, 3, H, W) for VAEs of images: uint8, or floats in −1..1.
    """
    if media.dtype == torch.uint8:
        media = model_range(media)
    output = vae.encode(media.to(vae.device, vae.dtype))
    return output.latent_dist.mode() if "latent_dist" in output else output.latent


def of_settings(vae: ModelMixin) -> tuple[Numbers, Numbers]:
    """Mean and standard deviation of each channel in the configuration of Wan's and Qwen-Image's VAE."""
    return vae.config.latents_mean, vae.config.latents_std


def of_buffers(vae: ModelMixin) -> tuple[Numbers, Numbers]:
    """Mean and standard deviation of each channel in the buffers of LTX's VAEs; `scaling_factor` divides the latter."""
    return vae.latents_mean, vae.latents_std / vae.config.scaling_factor


@dataclass(frozen=True)
class LatentScale:
    """How the latents of a family's VAE are normalised. Here: by its `shift_factor` and `scaling_factor`."""

    def apply(self, vae: ModelMixin, latents: torch.Tensor) -> torch.Tensor:
        """Latents of a VAE, (B, C, …), in the scale that transformers take."""
        return scaled(vae, latents)

    def undo(self, vae: ModelMixin, latents: torch.Tensor) -> torch.Tensor:
        """Invert `apply`: normalised latents in the scale that the VAE decodes."""
        return unscaled(vae, latents)


@dataclass(frozen=True)
class ChannelScale(LatentScale):
    """Each channel is normalised by its mean and standard deviation."""

    numbers: Callable[[ModelMixin], tuple[Numbers, Numbers]]
    """VAE → mean and standard deviation of each channel."""

    @override
    def apply(self, vae: ModelMixin, latents: torch.Tensor) -> torch.Tensor:
        return standardised(latents, *self.numbers(vae))

    @override
    def undo(self, vae: ModelMixin, latents: torch.Tensor) -> torch.Tensor:
        return unstandardised(latents, *self.numbers(vae))


BY_SETTINGS, BY_BUFFERS = ChannelScale(of_settings), ChannelScale(of_buffers)


def scaled(vae: ModelMixin, latents: torch.Tensor) -> torch.Tensor:
    """(z − shift_factor) · scaling_factor, from the VAE's configuration; no shift where it has none."""
    shift = vae.config.get("shift_factor") or 0.0
    return ((_exact(latents) - shift) * vae.config.scaling_factor).to(latents.dtype)


def unscaled(vae: ModelMixin, latents: torch.Tensor) -> torch.Tensor:
    """Invert `scaled`: z / scaling_factor + shift_factor, in the type of the latents."""
    shift = vae.config.get("shift_factor") or 0.0
    return (_exact(latents) / vae.config.scaling_factor + shift).to(latents.dtype)


def standardised(latents: torch.Tensor, mean: Numbers, std: Numbers) -> torch.Tensor:
    """(z − mean) / std by channel, the second axis.

    Args:
        latents: (B, C, …).
        mean: (C,).
        std: (C,).
    """
    exact, mean, std = _of_channels(latents, mean, std)
    return ((exact - mean) / std).to(latents.dtype)


def unstandardised(latents: torch.Tensor, mean: Numbers, std: Numbers) -> torch.Tensor:
    """Invert `standardised`: z · std + mean by channel, in the type of the latents."""
    exact, mean, std = _of_channels(latents, mean, std)
    return (exact * std + mean).to(latents.dtype)


def _of_channels(latents: torch.Tensor, *numbers: Numbers) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents and two numbers a channel, to be computed with each other."""
    exact, shape = _exact(latents), (1, -1, *[1] * (latents.dim() - 2))
    mean, std = (torch.as_tensor(each, device=exact.device, dtype=exact.dtype).view(shape) for each in numbers)
    return exact, mean, std


def _exact(latents: torch.Tensor) -> torch.Tensor:
    return latents.to(torch.promote_types(latents.dtype, torch.float32))
