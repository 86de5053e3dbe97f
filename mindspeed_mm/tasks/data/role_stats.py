"""Statistics of the media that a generator is given beside the target: sources, masks, controls, sounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict, TypeVar

import numpy as np

from mindspeed_mm.tasks.data.facts import RoleFacts
from mindspeed_mm.tasks.data.histogram import percentiles

_Key = TypeVar("_Key")

_MOST_SIZES = 5


class RoleStats(TypedDict):
    """What the media of one role are like, for machines."""

    kinds: dict[str, int]
    """Kind → media."""
    sizes: dict[str, int]
    """The most frequent sizes as `width × height`, with their media."""
    frames: Mapping[str, float]
    seconds: dict[str, float]
    cut_share: dict[str, float]


def role_stats(samples: Iterable[Sequence[RoleFacts]]) -> dict[str, RoleStats]:
    """Role → statistics of its media in all samples."""
    by_role: dict[str, list[RoleFacts]] = {}
    for roles in samples:
        for each in roles:
            by_role.setdefault(each.role, []).append(each)
    return {role: _of_role(found) for role, found in by_role.items()}


def _of_role(found: Sequence[RoleFacts]) -> RoleStats:
    kinds: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    frames, seconds, cut = [], [], []
    for each in found:
        medium = each.medium
        kinds[medium.kind] += 1
        if medium.width:
            sizes[f"{medium.width} × {medium.height}"] += 1
            cut.append(each.cut)
        if medium.frames > 1:
            frames.append(medium.frames)
        if medium.seconds:
            seconds.append(medium.seconds)
    return {
        "kinds": dict(kinds.most_common()),
        "sizes": dict(sizes.most_common(_MOST_SIZES)),
        "frames": percentiles(frames),
        "seconds": shares(seconds),
        "cut_share": shares(cut),
    }


def shares(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, 95th percentile and most of some values; nothing of none."""
    if not values:
        return {}
    found = {"mean": float(np.mean(values))}
    for name, percent in {"p50": 50, "p95": 95, "max": 100}.items():
        found[name] = float(np.percentile(values, percent, method="inverted_cdf"))
    return {name: round(value, 3) for name, value in found.items()}


def role_lines(stats: Mapping[str, RoleStats]) -> list[str]:
    """Return lines of text with the statistics of each role: kinds, sizes, frames, seconds and share cut away."""
    lines = []
    for role, told in stats.items():
        lines.append(f"  {role.replace('_', ' ')}: {', '.join(times_each(told['kinds']))}")
        if told["sizes"]:
            sizes = with_counts(told["sizes"])[:_MOST_SIZES]
            lines.append(f"    most frequent sizes (width × height): {', '.join(sizes)}")
        lines += percentile_line("  frames", told["frames"])
        lines += percentile_line("  seconds", told["seconds"])
        lines += percentile_line("  share that is cut away", told["cut_share"])
    return lines


def percentile_line(title: str, values: Mapping[str, float]) -> list[str]:
    """One line of named values; none where there are no values."""
    if not values:
        return []
    return [f"  {title}: {named_numbers(values)}"]


def named_numbers(values: Mapping[str, float]) -> str:
    """Join names and numbers in one line of text, such as `median 12, largest 1,200`."""
    return ", ".join(f"{name} {value:,}" for name, value in values.items())


def times_each(counts: Mapping[_Key, int]) -> list[str]:
    """`1,200 × image` of each."""
    return [f"{count:,} × {name}" for name, count in counts.items()]


def with_counts(counts: Mapping[_Key, int]) -> list[str]:
    """Return each key with its count as text, such as `640×480 (1,200)`."""
    return [f"{name} ({count:,})" for name, count in counts.items()]
