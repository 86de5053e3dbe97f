"""What to say at the start of media that become something else on the way to their samples: scaled, cut, resampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.fsdp.data.data_utils.decoding.video import is_near_rate
from mindspeed_mm.fsdp.data.datasets.generation.pixels import MediaHeader
from mindspeed_mm.fsdp.data.datasets.generation.sizes import MUCH_CUT, MUCH_ENLARGED, SizeChange

_SAME_RATE = 0.01
"""Rates that differ by less are told as one."""


def scaling_notes(headers: Sequence[MediaHeader], sizes: Sequence[MediaSize], place: Callable[[int], Any]) -> list[str]:
    """What to say of media that are enlarged more than twice, or lose more than a third of their area."""
    enlarged: dict[int, float] = {}
    cut: dict[int, float] = {}
    for index, (header, size) in enumerate(zip(headers, sizes, strict=True)):
        change = SizeChange.of(header, size)
        if change.enlarged > MUCH_ENLARGED:
            enlarged[index] = change.enlarged
        if change.cut > MUCH_CUT:
            cut[index] = change.cut
    notes = []
    if enlarged:
        worst = max(enlarged, key=enlarged.__getitem__)
        notes.append(
            f"{len(enlarged)} of {len(sizes)} media are enlarged more than {MUCH_ENLARGED:g} times along a side, "
            f"{place(worst)} most of all, {enlarged[worst]:.3g} times. preprocess_parameters.max_enlargement "
            "sets the limit"
        )
    if cut:
        worst = max(cut, key=cut.__getitem__)
        notes.append(
            f"{len(cut)} of {len(sizes)} media lose more than a third of their area, {place(worst)} most of all, "
            f"{cut[worst]:.0%}. preprocess_parameters.max_cut sets the limit"
        )
    return notes


def rates_note(rates: Sequence[float], model_fps: float, *, is_resampled: bool) -> str:
    """What to say of clips that have another rate than the model makes; empty where none differs by a tenth.

    Args:
        rates: Frames a second of each clip: of its file where it is resampled, else as it is read.
        model_fps: What the model makes.
        is_resampled: Whether `model_fps` are taken of clips of another rate.
    """
    others = [rate for rate in rates if not is_near_rate(rate, model_fps)]
    if not others:
        return ""
    found = f"{min(others):.4g}"
    if max(others) - min(others) >= _SAME_RATE:
        found += f" to {max(others):.4g}"
    if is_resampled:
        return (
            f"{len(others)} of {len(rates)} clips have {found} frames a second: they are resampled to the "
            f"{model_fps:g} that the model makes. preprocess_parameters.frame_interval: 1 takes every frame"
        )
    return (
        f"{len(others)} of {len(rates)} clips are read with {found} frames a second, and the model makes "
        f"{model_fps:g}: it would learn another speed. Without preprocess_parameters.fps and frame_interval they are "
        "resampled"
    )
