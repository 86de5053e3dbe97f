"""The 1,797 scanned digits that travel in this package, and how they are dealt to splits.

Source and licence of the scans: `data/SOURCE.md`.
"""

from __future__ import annotations

import gzip
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Protocol, TypeVar

import numpy as np

SEED = 0
MOST_INK = 16
"""Ink of a pixel that is wholly black."""
SIDE = 8
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class ShowsDigit(Protocol):
    """A scan, however it is pictured: the digit that it shows is known."""

    @property
    def digit(self) -> int:
        """The digit, 0 to 9."""


ScanKind = TypeVar("ScanKind", bound=ShowsDigit)


def load_ink() -> tuple[np.ndarray, np.ndarray]:
    """All scans in the order of the source.

    Returns:
        Ink, (1797, 8, 8) float64 from 0 to 16, and the digits shown, (1797,) int64.
    """
    packed = (files(__package__) / "data" / "optdigits.tes.gz").read_bytes()
    lines = gzip.decompress(packed).decode("ascii").splitlines()
    table = np.array([line.split(",") for line in lines], dtype=np.int64)
    return table[:, :-1].reshape(-1, SIDE, SIDE).astype(np.float64), table[:, -1]


def deal_scans(scans: Iterable[ScanKind], shares: Mapping[str, float], seed: int = SEED) -> dict[str, list[ScanKind]]:
    """Deal the scans of every digit to splits, by a shuffle with this seed.

    Args:
        scans: All of them.
        shares: Name of each split → share of the scans; the shares add up to 1.
        seed: Of the shuffle.
    """
    by_digit: dict[int, list[ScanKind]] = defaultdict(list)
    for scan in scans:
        by_digit[scan.digit].append(scan)
    splits: dict[str, list[ScanKind]] = {name: [] for name in shares}
    for digit, same in sorted(by_digit.items()):
        random.Random(f"{seed}/{digit}").shuffle(same)
        start, share = 0, 0.0
        for name in shares:
            share += shares[name]
            end = round(share * len(same))
            splits[name] += same[start:end]
            start = end
    return splits
