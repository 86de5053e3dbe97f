"""What to say at the start of media that become something else on the way to their samples: scaled, cut, resampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspeed_mm.core.counts import by_count
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
        worst, verb = max(enlarged, key=enlarged.__getitem__), by_count(len(enlarged), "is", "are")
        notes.append(
            f"{len(enlarged)} of {len(sizes)} media {verb} enlarged more than {MUCH_ENLARGED:g} times along a side, "
            f"{place(worst)} most of all, {enlarged[worst]:.3g} times. preprocess_parameters.max_enlargement "
            "sets the limit"
        )
    if cut:
        worst, verb = max(cut, key=cut.__getitem__), by_count(len(cut), "loses", "lose")
        notes.append(
            f"{len(cut)} of {len(sizes)} media {verb} more than a third of the area, {place(worst)} most of all, "
            f"{cut[worst]:.0%}. preprocess_parameters.max_cut sets the limit"
        )
    return notes


def stills_note(is_still: Sequence[bool], asked: Sequence[int]) -> str:
    """What to say of pictures among clips; empty where there are none, or one frame is what is asked for.

    Args:
        is_still: Whether each medium is a picture.
        asked: Frames of the sizes that are configured.
    """
    if not any(is_still) or not asked or min(asked) == 1:
        return ""
    count = sum(is_still)
    frames = ", ".join(map(str, sorted(set(asked))))
    return (
        f"{count} of {len(is_still)} media {by_count(count, 'is a picture', 'are pictures')}, and clips of {frames} "
        "frames are asked for: trained as one frame"
    )


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
    clips, found = f"{len(others)} of {len(rates)} clips", _range(others)
    if is_resampled:
        return (
            f"{clips} {by_count(len(others), 'has', 'have')} {found} frames a second, resampled to the "
            f"{model_fps:g} that the model makes. preprocess_parameters.frame_interval: 1 takes every frame"
        )
    return (
        f"{clips} {by_count(len(others), 'is', 'are')} read with {found} frames a second, and the model makes "
        f"{model_fps:g}: it would learn another speed. Without preprocess_parameters.fps and frame_interval they are "
        "resampled"
    )


def doubled_note(rates: Sequence[tuple[float, float]]) -> str:
    """What to say of clips of which more frames a second are taken than they have, so that some are taken twice or
    more; empty where there are none.

    Args:
        rates: Of each clip, frames a second of its file and those that are taken.
    """
    doubled = [(own, taken) for own, taken in rates if taken > own and not is_near_rate(own, taken)]
    if not doubled:
        return ""
    own, taken = (_range(each) for each in zip(*doubled, strict=True))
    verb = by_count(len(doubled), "has", "have")
    return (
        f"{len(doubled)} of {len(rates)} clips {verb} {own} frames a second, and {taken} are taken: frames are "
        "repeated, and motion stutters. Leave such clips out, or set preprocess_parameters.frame_interval: 1, which "
        "shows them faster"
    )


def _range(rates: Sequence[float]) -> str:
    least, most = min(rates), max(rates)
    return f"{least:.4g}" if most - least < _SAME_RATE else f"{least:.4g} to {most:.4g}"
