"""Tiny folders of generators that are given media beside the caption, made by diffusers' own `save_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.tiny_generators import FLUX_VAE, make_tiny_flux, make_tiny_wan

_RATIO = 2
_PACKED = 4 * int(FLUX_VAE["latent_channels"])


def make_tiny_conditioned(folder: Path, name: str) -> Path:
    """A folder of the family called `kontext`, `fill`, `flf2v`, `v2v`, `vace` or `vace_references`, in `folder`."""
    if name == "kontext":
        return make_tiny_flux(folder, pipeline="FluxKontextPipeline")
    if name == "fill":
        channels = {"in_channels": 2 * _PACKED + 4 * _RATIO**2, "out_channels": _PACKED}
        return make_tiny_flux(folder, pipeline="FluxFillPipeline", **channels)
    if name == "flf2v":
        tokens = 2 * (1 + (32 // 16) ** 2)
        return make_tiny_wan(folder, task="i2v", pos_embed_seq_len=tokens)
    if name == "v2v":
        return make_tiny_wan(folder)
    sizes: dict[str, Any] = {"vace_layers": [0], "vace_in_channels": 2 * 16 + 64}
    return make_tiny_wan(folder, task="vace", **sizes)
