"""Two models on the same questions: which is better, and whether that may be chance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

_DRAWS = 2000


@dataclass(frozen=True)
class PairedTest:
    """The first model over the second, question by question."""

    questions: int
    better: int
    """Questions on which the first did better."""
    worse: int
    difference: float
    """Of the two means; `low` and `high` bound it with 95 % confidence."""
    low: float
    high: float
    p_value: float | None
    """Of McNemar's exact test that both are equally good; None where answers are right by degrees."""

    def __str__(self) -> str:
        points, low, high = (f"{100 * value:+.1f}" for value in (self.difference, self.low, self.high))
        chance = "" if self.p_value is None else f", p = {self.p_value:.2g} by McNemar's exact test"
        return (
            f"{points} points (95 % interval {low} to {high}); better on {self.better}, worse on {self.worse} of "
            f"{self.questions} questions{chance}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Fields by name."""
        return asdict(self)


def compare(ours: Mapping[str, float], theirs: Mapping[str, float], *, is_graded: bool) -> PairedTest:
    """Compare two models' shares, by question.

    Args:
        ours: Question → share of the first model.
        theirs: The same questions for the second.
        is_graded: Whether answers are right by degrees.

    Raises:
        ValueError: They are other questions, or none.
    """
    if ours.keys() != theirs.keys() or not ours:
        raise ValueError("the two were not asked the same questions")
    differences = np.array([ours[name] - theirs[name] for name in ours])
    better, worse = int((differences > 0).sum()), int((differences < 0).sum())
    low, high = _interval(differences)
    p_value = None if is_graded else mcnemar(better, worse)
    return PairedTest(len(differences), better, worse, float(differences.mean()), low, high, p_value)


def mcnemar(better: int, worse: int) -> float:
    """Two-sided p-value that each question on which two models differ is as likely to favour either (McNemar 1947,
    Psychometrika 12; exact, by the binomial distribution)."""
    n = better + worse
    tail: int = sum(math.comb(n, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**n)


def _interval(differences: np.ndarray) -> tuple[float, float]:
    """The middle 95 % of means over as many questions drawn with replacement."""
    draw = np.random.default_rng(0)
    rows = (draw.integers(0, len(differences), len(differences)) for _ in range(_DRAWS))
    low, high = np.quantile([differences[chosen].mean() for chosen in rows], [0.025, 0.975])
    return float(low), float(high)
