"""Counts of values in ranges that people read: 1, 2, 5 and their tenfolds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_MOST_BINS = 10
_WIDE = 20
"""From this ratio of the largest to the smallest value on, ranges grow with the values."""


class Bin(NamedTuple):
    """Values from `low` up to, not with, `high`."""

    low: int
    high: int
    rows: int


def as_dicts(bins: Sequence[Bin]) -> list[dict[str, int]]:
    """Return each bin as a dictionary with `low`, `high` and `rows`, for JSON."""
    return [each._asdict() for each in bins]


def histogram(values: Sequence[int] | np.ndarray) -> list[Bin]:
    """Ranges and counts, empty ones inside included; none for no values."""
    found = np.asarray(values, dtype=np.int64)
    if not len(found):
        return []
    low, high = int(found.min()), int(found.max())
    if high > _WIDE * max(low, 1):
        edges = _growing(low, high)
    else:
        width = max(1, _nice_above((high - low + 1) / _MOST_BINS))
        first = low // width * width
        edges = list(range(first, high + width + 1, width))
    counts, _ = np.histogram(found, bins=np.array(edges))
    return [Bin(a, b, int(n)) for a, b, n in zip(edges[:-1], edges[1:], counts.tolist(), strict=True)]


def _growing(low: int, high: int) -> list[int]:
    edges = [1]
    while edges[-1] <= high:
        edges.append(_nice_above(edges[-1] + 1))
    while len(edges) > 1 and edges[1] <= low:  # a range that ends before the first value
        edges.pop(0)
    if low < edges[0]:
        edges.insert(0, 0)
    return edges


def _nice_above(value: float) -> int:
    """The least of 1, 2, 5, 10, 20, 50 … that is not below the value."""
    power = 10 ** math.floor(math.log10(max(value, 1)))
    return next(int(step * power) for step in (1, 2, 5, 10) if step * power >= value)


def percentiles(values: Sequence[int] | np.ndarray) -> dict[str, float]:
    """Mean, total, extremes and percentiles; empty for no values."""
    found = np.asarray(values)
    if not len(found):
        return {}
    names = {"p5": 5, "p50": 50, "p95": 95, "p99": 99}
    marks = np.percentile(found, list(names.values()), method="inverted_cdf")
    named = {name: int(mark) for name, mark in zip(names, marks.tolist(), strict=True)}
    return {
        "total": int(found.sum()),
        "mean": round(float(found.mean()), 1),
        "min": int(found.min()),
        **named,
        "max": int(found.max()),
    }
