"""Qwen-Image's VAE, one of videos, as a VAE of pictures: what `PictureVAE` asks of diffusers' AutoencoderKL."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.configuration_utils import FrozenDict
from torch import nn

from mindspeed_mm.fsdp.models.diffusion.latents import standardised, unstandardised


@dataclass(frozen=True)
class OneFramePosterior:
    """The normal distribution of a picture's latents, mean and standard deviation (B, C, h, w)."""

    mean: torch.Tensor
    std: torch.Tensor

    def mode(self) -> torch.Tensor:
        """The likeliest latents, which are the mean."""
        return self.mean

    def sample(self, generator: torch.Generator) -> torch.Tensor:
        """Latents that chance draws, on the host whatever the device is."""
        noise = torch.randn(self.mean.shape, generator=generator, dtype=self.mean.dtype)
        return self.mean + self.std * noise.to(self.mean.device)


@dataclass(frozen=True)
class _Encoded:
    latent_dist: OneFramePosterior


@dataclass(frozen=True)
class _Decoded:
    sample: torch.Tensor


class OneFrameVAE(nn.Module):
    """Pictures are clips of one frame; latents have mean 0 and variance 1 by channel already.

    Args:
        vae: Of diffusers.
    """

    wraps = AutoencoderKLQwenImage.__name__

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.vae = vae
        # `temperal` is diffusers' spelling. The last level does not halve.
        levels = len(vae.config.temperal_downsample) + 1
        # The scale is 1 because `encode` and `decode` normalise by themselves.
        self.config = FrozenDict(latent_channels=vae.config.z_dim, block_out_channels=(0,) * levels, scaling_factor=1.0)

    @classmethod
    def from_pretrained(cls, folder: Path, **options: Any) -> OneFrameVAE:
        """With the weights of a folder in diffusers' layout; `options` as diffusers takes them."""
        return cls(AutoencoderKLQwenImage.from_pretrained(folder, **options))

    @staticmethod
    def load_config(folder: Path) -> Any:
        """The configuration of a folder in diffusers' layout."""
        return AutoencoderKLQwenImage.load_config(folder)

    @classmethod
    def from_config(cls, config: object) -> OneFrameVAE:
        """With random weights, of the sizes that a configuration has."""
        return cls(AutoencoderKLQwenImage.from_config(config))

    def encode(self, pictures: torch.Tensor) -> _Encoded:
        """(B, 3, H, W) in -1..1 → the posterior of their latents."""
        posterior = self.vae.encode(pictures[:, :, None]).latent_dist
        config = self.vae.config
        mean = standardised(posterior.mean, config.latents_mean, config.latents_std)
        # The mean moves no deviation, so it is left out here.
        none = [0.0] * len(config.latents_std)
        deviation = standardised(posterior.std, none, config.latents_std)
        return _Encoded(OneFramePosterior(mean[:, :, 0], deviation[:, :, 0]))

    def decode(self, latents: torch.Tensor) -> _Decoded:
        """(B, C, h, w) → pictures (B, 3, H, W)."""
        config = self.vae.config
        raw = unstandardised(latents[:, :, None], config.latents_mean, config.latents_std)
        return _Decoded(self.vae.decode(raw, return_dict=False)[0][:, :, 0])
