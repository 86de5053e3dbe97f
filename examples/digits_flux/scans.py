"""The package's 1,797 scanned digits, dealt to the generator and to its judges: neither sees a scan of the other's."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from mindspeed_mm.quickstart.scans import MOST_INK, NAMES, SEED, SIDE, deal_scans, load_ink

__all__ = ["NAMES", "SEED", "SIDE", "SPLITS", "Scan", "generators_scans", "load_scans", "split_scans"]

SPLITS = {"train": 0.70, "validation": 0.05, "judge": 0.25}
"""The generator learns from `train` and is validated on `validation`; the judges learn from `judge`."""


class Scan(NamedTuple):
    """One scanned digit: its index in the source, the digit it shows, and (8, 8) uint8, ink bright."""

    index: int  # type: ignore[assignment]  # tuples have a method of this name, which nobody asks of a scan
    digit: int
    picture: np.ndarray


def load_scans() -> list[Scan]:
    """All scans in the order of the source."""
    ink, digits = load_ink()
    pictures = (ink * (255 / MOST_INK)).round().astype(np.uint8)
    return [Scan(i, int(digit), picture) for i, (digit, picture) in enumerate(zip(digits, pictures, strict=True))]


split_scans = functools.partial(deal_scans, shares=SPLITS)


def generators_scans(splits: dict[str, list[Scan]]) -> list[Scan]:
    """All that the generator has seen, validation included."""
    return splits["train"] + splits["validation"]
