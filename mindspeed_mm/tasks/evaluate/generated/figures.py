"""Measured values as results hold them: a value, and for means the number of samples and a 95 % interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mindspeed_mm.fsdp.sampling.answers.scoring import bootstrap_interval

Measured = dict[str, Any]
"""`value`, None where it is infinite; of means `n`, and `low` and `high`, the bounds of a 95 % interval;
of PSNR also `identical`, the number of pairs that are left out of it, where there are any."""


def mean_of(values: Sequence[float], weights: Sequence[float] | None = None) -> Measured:
    """The mean of samples, with the interval of samples drawn with replacement.

    Args:
        values: Of each sample.
        weights: How much each counts; None: alike.
    """
    if not all(map(math.isfinite, values)):  # JSON has no infinity
        return {"value": None, "n": len(values)}
    units = np.ones(len(values)) if weights is None else np.array(weights, dtype=float)
    sums = np.array(values) * units
    low, high = bootstrap_interval(sums, units)
    return {"value": float(sums.sum() / units.sum()), "n": len(values), "low": low, "high": high}


def told(name: str, one: Measured) -> str:
    """Return a measure as one line of text: its name, value and, for means, number of samples and 95 % interval."""
    value = "infinite" if one["value"] is None else f"{one['value']:.5g}"
    text = f"{name}: {value}"
    if "low" in one:
        text += f" (n={one['n']}, 95 % interval {one['low']:.5g} to {one['high']:.5g})"
    if count := one.get("identical", 0):
        pairs = "pair" if count == 1 else "pairs"
        text += f"; {count} identical {pairs} left out"
    return text
