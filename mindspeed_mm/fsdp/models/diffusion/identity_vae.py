"""A VAE that leaves pixels as they are, so that small generators train in pixel space behind the same interface."""

from __future__ import annotations

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.autoencoders.vae import DecoderOutput
from diffusers.models.modeling_outputs import AutoencoderKLOutput


class PixelDistribution:
    """Stands for a posterior: every draw from it is the pixels themselves."""

    def __init__(self, pixels: torch.Tensor) -> None:
        self._pixels = pixels

    @property
    def std(self) -> torch.Tensor:
        """Zeros: all draws are alike."""
        return torch.zeros_like(self._pixels)

    def mode(self) -> torch.Tensor:
        """Return the pixels, which are the distribution's only value."""
        return self._pixels

    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """The pixels too: there is nothing to draw."""
        return self._pixels


class IdentityVAE(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Latents are pixels in −1..1. Works inside diffusers' pipelines of images and, with `video`, of videos.

    Its configuration bears what the pipelines read of a real VAE: no compression, and the normalisation of latents that
    adapters and pipelines do around it, none unless given.

    Args:
        latent_channels: 3 for RGB; 1 for their mean, which decoding repeats.
        video: Whether latents have a time axis.
        block_out_channels: One entry: the image pipelines read the spatial ratio off its length.
        scaling_factor: Images: what latents are multiplied by after the shift.
        shift_factor: Images: what is taken from latents first.
        scale_factor_temporal: Frames of a latent frame; 1.
        scale_factor_spatial: Pixels along a side of a latent position; 1.
        z_dim: Set by itself.
        latents_mean: Videos: mean of each channel, taken from latents; None: zeros.
        latents_std: Videos: standard deviation of each channel, by which they are divided then; None: ones.
    """

    @register_to_config
    def __init__(
        self,
        latent_channels: int = 3,
        video: bool = False,
        block_out_channels: tuple[int, ...] = (1,),
        scaling_factor: float = 1.0,
        shift_factor: float = 0.0,
        scale_factor_temporal: int = 1,
        scale_factor_spatial: int = 1,
        z_dim: int | None = None,
        latents_mean: tuple[float, ...] | None = None,
        latents_std: tuple[float, ...] | None = None,
    ) -> None:
        if latent_channels not in (1, 3):
            raise ValueError(f"latent_channels is 1 or 3, not {latent_channels}")
        super().__init__()
        self.register_to_config(
            z_dim=latent_channels,
            latents_mean=latents_mean or (0.0,) * latent_channels,
            latents_std=latents_std or (1.0,) * latent_channels,
        )
        self.register_buffer("unit", torch.ones(()))  # its dtype and device are what pipelines ask a model for

    def encode(self, pixels: torch.Tensor, return_dict: bool = True) -> AutoencoderKLOutput | tuple[PixelDistribution]:
        """(B, 3, …) pixels in −1..1 as (B, latent_channels, …) latents."""
        latents = pixels if self.config.latent_channels == 3 else pixels.mean(dim=1, keepdim=True)
        posterior = PixelDistribution(latents)
        if return_dict:
            return AutoencoderKLOutput(latent_dist=posterior)
        return (posterior,)

    def decode(self, latents: torch.Tensor, return_dict: bool = True) -> DecoderOutput | tuple[torch.Tensor]:
        """(B, latent_channels, …) latents as (B, 3, …) pixels."""
        repeats = [1] * latents.ndim
        repeats[1] = 3 // self.config.latent_channels
        pixels = latents.repeat(repeats)
        if return_dict:
            return DecoderOutput(sample=pixels)
        return (pixels,)
