"""Sizes of a family's latents, read off the configurations of its VAE and its transformer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_mm.core.media_geometry import MediaGeometry

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
    return 2 * ratio if "reflect" in modes else 0
