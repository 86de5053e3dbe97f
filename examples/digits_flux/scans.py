"""scikit-learn's 1,797 scanned digits, dealt to the generator and to its judges: neither sees a scan of the other's."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

SEED = 0
SPLITS = {"train": 0.70, "validation": 0.05, "judge": 0.25}
"""The generator learns from `train` and is validated on `validation`; the judges learn from `judge`."""
SIDE = 8
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class Scan(NamedTuple):
    """One scanned digit: its index in scikit-learn's data set, the digit it shows, and (8, 8) uint8, ink bright."""

    index: int  # type: ignore[assignment]  # tuples have a method of this name, which nobody asks of a scan
    digit: int
    picture: np.ndarray


def load_scans() -> list[Scan]:
    """All scans in scikit-learn's order."""
    from sklearn.datasets import load_digits  # a second, which those who only need names do without

    bunch = load_digits()
    pictures = (bunch.images * (255 / 16)).round().astype(np.uint8)
    return [Scan(i, int(digit), picture) for i, (digit, picture) in enumerate(zip(bunch.target, pictures, strict=True))]


def split_scans(scans: Iterable[Scan], seed: int = SEED) -> dict[str, list[Scan]]:
    """Deal the scans of every digit to the splits in their shares, by a shuffle with this seed."""
    by_digit: dict[int, list[Scan]] = defaultdict(list)
    for scan in scans:
        by_digit[scan.digit].append(scan)
    splits: dict[str, list[Scan]] = {name: [] for name in SPLITS}
    for digit, same in sorted(by_digit.items()):
        random.Random(f"{seed}/{digit}").shuffle(same)
        start, share = 0, 0.0
        for name in SPLITS:
            share += SPLITS[name]
            end = round(share * len(same))
            splits[name] += same[start:end]
            start = end
    return splits


def generators_scans(splits: dict[str, list[Scan]]) -> list[Scan]:
    """All that the generator has seen, validation included."""
    return splits["train"] + splits["validation"]
