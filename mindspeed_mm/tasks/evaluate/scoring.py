"""Exact match, counted per task, with the interval that the count leaves open."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable
from dataclasses import asdict, dataclass

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""


@dataclass(frozen=True)
class Score:
    """How many answers were right. `low` and `high` bound the accuracy with 95 % confidence; all three are shares."""

    correct: int
    n: int
    accuracy: float
    low: float
    high: float

    def __str__(self) -> str:
        low, high = f"{100 * self.low:.1f}", f"{100 * self.high:.1f}"
        return f"{100 * self.accuracy:.1f} % (n={self.n}, 95 % interval {low}–{high} %)"

    def to_dict(self) -> dict[str, float]:
        """Fields by name."""
        return asdict(self)


def score(outcomes: Iterable[bool]) -> Score:
    """Count right answers.

    Raises:
        ValueError: There are none at all.
    """
    results = list(outcomes)
    correct, n = sum(results), len(results)
    low, high = wilson_interval(correct, n)
    return Score(correct, n, correct / n, low, high)


def wilson_interval(correct: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """Bounds of a proportion by Wilson's score interval (Wilson 1927, JASA 22, p. 209); right at 0 and 1 too.

    Raises:
        ValueError: `n` is not positive.
    """
    if n <= 0:
        raise ValueError("no trials")
    share = correct / n
    centre = share + z * z / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    denominator = 1 + z * z / n
    low = (centre - spread) / denominator if correct else 0.0  # rounding would leave a trace of 0 and of 1
    return max(0.0, low), min(1.0, (centre + spread) / denominator) if correct < n else 1.0


def is_exact_match(given: str, expected: str) -> bool:
    """Whether two texts are the same characters; kinds of white space and its amount do not count."""
    return _normalised(given) == _normalised(expected)


def _normalised(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())
