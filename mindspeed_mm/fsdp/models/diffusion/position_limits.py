"""Largest and smallest sides that follow from how a transformer or a VAE is built, for `MediaGeometry`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_mm.core.media_geometry import SideRange


def up_to(tokens: int | None, pixels: int) -> SideRange:
    """Sides of at most so many tokens, each so many pixels long; None: no limit."""
    return 0, None if tokens is None else tokens * pixels


def ltx2_sides(vae: Mapping[str, Any], ratio: int) -> SideRange:
    """LTX-2's VAE mirrors one position at each border, which takes two (`encoder_spatial_padding_mode` and
    `decoder_spatial_padding_mode` of `AutoencoderKLLTX2Video`).

    Args:
        vae: Its configuration.
        ratio: Pixels along a side of a latent position.
    """
    modes = vae.get("encoder_spatial_padding_mode", "zeros"), vae.get("decoder_spatial_padding_mode", "reflect")
    return (2 * ratio if "reflect" in modes else 0), None
