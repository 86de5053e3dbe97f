"""Latents of a family of generators: their sizes, their scale, and how they stand as rows of tokens.

Sizes are read off the configurations of VAE and transformer. Latents are brought to mean 0 and variance 1 by one number
or channel by channel, computed in fp32 at least and returned in their type. Pixels go to encoders by the same
arithmetic as in diffusers' image processor, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from PIL import Image
from typing_extensions import override

from mindspeed_mm.core.media_geometry import MediaGeometry

if TYPE_CHECKING:
    from diffusers import ModelMixin


Config = Mapping[str, Any]
"""Configuration of a component."""
Ratios = Callable[[Config], tuple[int, int]]
"""Configuration of a VAE → pixels along one side of a latent position, and frames of a latent frame."""
LTX2_VAE = "AutoencoderKLLTX2Video"


def by_blocks(name: str = "block_out_channels", blocks: int = 4, frames: int = 1) -> Ratios:
    """Ratios of VAEs that halve the sides in each block but one.

    Args:
        name: Setting with one entry for each block.
        blocks: How many there are by default.
        frames: `temporal_compression_ratio` by default.
    """
    return lambda vae: (
        2 ** (len(vae.get(name, (0,) * blocks)) - 1),
        int(vae.get("temporal_compression_ratio", frames)),
    )


def by_settings(pixels: int, frames: int) -> Ratios:
    """Ratios of VAEs that state them, under the names of Wan's VAE or of the others. Arguments are the defaults."""
    return lambda vae: (
        int(vae.get("scale_factor_spatial") or vae.get("spatial_compression_ratio") or pixels),
        int(vae.get("scale_factor_temporal") or vae.get("temporal_compression_ratio") or frames),
    )


_BY_BLOCKS = by_blocks()


@dataclass(frozen=True)
class LatentSizes:
    """How `MediaGeometry` follows from a family's configurations."""

    channels: int
    """Latent channels where no configuration states them."""
    channels_from: tuple[str, ...] = ("transformer.in_channels",)
    """`component.setting` that state them, of which the first one counts that has a value."""
    ratios: Ratios = _BY_BLOCKS
    """How the VAE states its ratios."""
    patch: int = 2
    """Latent positions along a side of a token where the transformer's `patch_size` does not state them."""
    packs: bool = False
    """Whether the pipeline packs tokens of `patch`, whatever `patch_size` is, and channels are those of a token."""
    folded: int = 1
    """Positions of the VAE along a side that become one position of the latents."""
    is_video: bool = False
    step: int = 0
    """The pipelines reject heights and widths that are not multiples of it; 0: they have no rule of their own."""
    positions: tuple[str, int | tuple[int, int, int]] | None = None
    """Setting of the transformer with the number of its positions, for each axis or for all three, and its default."""
    vae_class: str = ""
    """Class of the VAE where its configuration is not known."""

    def geometry(self, vae: Config, transformer: Config) -> MediaGeometry:
        """Sizes that a VAE and a transformer with these configurations take."""
        ratio, in_time = self.ratios(vae)
        ratio *= self.folded
        patch, channels = self._patch(transformer), self._channels(vae, transformer)
        if self.packs:
            channels //= math.prod(patch)
        frames, rows, columns = self._positions(transformer)
        high, wide = ratio * patch[1], ratio * patch[2]
        least = 0
        if vae.get("_class_name", self.vae_class) == LTX2_VAE:
            least = _least(vae, ratio)
        return MediaGeometry(
            spatial_ratio=ratio,
            temporal_ratio=in_time,
            patch=patch,
            latent_channels=channels,
            is_video=self.is_video,
            spatial_step=math.lcm(self.step, high, wide),
            heights=(least, rows and rows * high),
            widths=(least, columns and columns * wide),
            most_frames=frames and (frames * patch[0] - 1) * in_time + 1,
        )

    def _patch(self, transformer: Config) -> tuple[int, int, int]:
        if self.packs:
            return 1, self.patch, self.patch
        found = transformer.get("patch_size", self.patch)
        if isinstance(found, Sequence):
            t, h, w = found
            return t, h, w
        return int(transformer.get("patch_size_t") or 1), int(found), int(found)

    def _positions(self, transformer: Config) -> Sequence[int | None]:
        """Along time, height and width; None: no limit."""
        if self.positions is None:
            return None, None, None
        found = transformer.get(*self.positions)
        if isinstance(found, int):
            found = (found, found, found)
        if not self.is_video:
            return None, *found[1:]
        return found

    def _channels(self, vae: Config, transformer: Config) -> int:
        configs = {"vae": vae, "transformer": transformer}
        stated = (configs[component].get(name) for component, name in (each.split(".") for each in self.channels_from))
        return int(next(filter(None, stated), self.channels))


def _least(vae: Config, ratio: int) -> int:
    """LTX-2's VAE mirrors one position at each border, which takes two (`encoder_spatial_padding_mode` and
    `decoder_spatial_padding_mode` of `AutoencoderKLLTX2Video`)."""
    modes = vae.get("encoder_spatial_padding_mode", "zeros"), vae.get("decoder_spatial_padding_mode", "reflect")
    if "reflect" in modes:
        return 2 * ratio
    return 0


def model_range(pixels: torch.Tensor) -> torch.Tensor:
    """uint8 → fp32 in −1..1."""
    return 2.0 * (pixels.float() / 255.0) - 1.0


def as_bytes(pixels: torch.Tensor) -> torch.Tensor:
    """Turn values in −1..1 into uint8, rounded; values outside the range are clipped."""
    return ((pixels.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)


def as_pil(pixels: torch.Tensor) -> list[Image.Image]:
    """(B, 3, H, W) uint8 → images."""
    return [Image.fromarray(image) for image in pixels.permute(0, 2, 3, 1).cpu().numpy()]


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
    if "latent_dist" in output:
        return output.latent_dist.mode()
    return output.latent


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


def patchified(planes: torch.Tensor, side: int) -> torch.Tensor:
    """(C, h · side, w · side) → (h · w, side² · C): the numbers of a token run over rows, columns, channels."""
    channels, height, width = planes.shape
    squares = planes.view(channels, height // side, side, width // side, side)
    return squares.permute(1, 3, 2, 4, 0).reshape(-1, side * side * channels)


def unpatchified(tokens: torch.Tensor, height: int, width: int, side: int) -> torch.Tensor:
    """Invert `patchified`: (h · w, side² · C) → (C, h · side, w · side).

    Args:
        tokens: Of one picture.
        height: h.
        width: w.
        side: Of a square.
    """
    squares = tokens.view(height, width, side, side, -1)
    return squares.permute(4, 0, 2, 1, 3).reshape(-1, height * side, width * side)


def places_of(rows: int, columns: int, per_side: int) -> torch.Tensor:
    """(rows · columns,) int64 places of a picture's tokens in a square table with `per_side` of them along a side."""
    return (torch.arange(rows)[:, None] * per_side + torch.arange(columns)).flatten()
