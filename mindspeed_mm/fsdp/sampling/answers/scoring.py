"""How answers are compared with the expected ones: exact match, or the share of words or characters that are wrong;
each with the interval that the number of answers leaves open."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

import jiwer
import numpy as np

from mindspeed_mm.core.json_file import JsonObject

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""
_DRAWS = 1000
"""Of rows, for the interval of an error rate."""

Metric = Literal["exact", "wer", "cer"]
METRICS: dict[Metric, str] = {"exact": "accuracy", "wer": "word error rate", "cer": "character error rate"}
"""Name → what is counted."""


@dataclass(frozen=True)
class _Fields:
    """Base of all scores: gives their fields as a dict."""

    def to_dict(self) -> dict[str, float]:
        """Return the fields of the score by name."""
        return asdict(self)


def _interval(low: float, high: float) -> str:
    """Of a share, in per cent."""
    return f"95 % interval {100 * low:.1f}–{100 * high:.1f}"


@dataclass(frozen=True)
class Score(_Fields):
    """How many answers were right. `low` and `high` bound the accuracy with 95 % confidence; all three are shares."""

    correct: int
    n: int
    accuracy: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.accuracy:.1f} % (n={self.n}, {_interval(self.low, self.high)} %)"


@dataclass(frozen=True)
class ErrorRate(_Fields):
    """How many words, or characters, were wrong, over those of the expected answers; above 1 when much is inserted.
    `low` and `high` bound the rate with 95 % confidence."""

    errors: int
    """Substitutions, deletions and insertions, by the shortest way from the expected answer to the given one."""
    units: int
    """Words or characters of the expected answers."""
    n: int
    rate: float
    low: float
    high: float

    def __str__(self) -> str:
        counted = f"{self.errors:,} of {self.units:,}, n={self.n}"
        return f"{100 * self.rate:.1f} % ({counted}, {_interval(self.low, self.high)} %)"


@dataclass(frozen=True)
class GradedScore(_Fields):
    """The mean of answers that are right by degrees, each a share from 0 to 1. `low` and `high` bound it with 95 %
    confidence."""

    n: int
    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f} (n={self.n}, {_interval(self.low, self.high)})"


def graded(shares: Sequence[float]) -> GradedScore:
    """The mean of shares.

    Raises:
        ValueError: There are none at all.
    """
    if not shares:
        raise ValueError("no answers")
    values = np.array(shares)
    low, high = bootstrap_interval(values, np.ones(len(values)))
    return GradedScore(len(values), float(values.mean()), low, high)


def score(outcomes: Iterable[bool]) -> Score:
    """Count right answers.

    Raises:
        ValueError: There are none at all.
    """
    results = list(outcomes)
    correct, n = sum(results), len(results)
    low, high = wilson_interval(correct, n)
    return Score(correct, n, correct / n, low, high)


class Outcome(NamedTuple):
    """How one answer compares with the expected one; `errors` and `units` stay 0 for exact match."""

    correct: bool
    errors: int = 0
    units: int = 0


@dataclass(frozen=True)
class Comparison:
    """How answers are compared. Kinds and amount of white space never count, nor how a character is composed.

    Args:
        metric: `exact`: whether an answer is the expected one. `wer`, `cer`: words or characters that are wrong.
        ignore_case: Small and capital letters are the same.
        ignore_punctuation: Characters of Unicode's category P do not count.
    """

    metric: Metric = "exact"
    ignore_case: bool = False
    ignore_punctuation: bool = False

    def outcome(self, given: str, expected: str) -> Outcome:
        """Compare one answer with the expected one, both normalised."""
        given, expected = self._normalised(given), self._normalised(expected)
        if self.metric == "exact":
            return Outcome(given == expected)
        align = jiwer.process_words if self.metric == "wer" else jiwer.process_characters
        found = align(expected, given)
        errors = found.substitutions + found.deletions + found.insertions
        return Outcome(given == expected, errors, found.hits + found.substitutions + found.deletions)

    def score(self, outcomes: Sequence[Outcome]) -> Score | ErrorRate:
        """All answers together.

        Raises:
            ValueError: There are none at all.
        """
        if self.metric == "exact":
            return score(outcome.correct for outcome in outcomes)
        errors = np.array([outcome.errors for outcome in outcomes])
        units = np.array([outcome.units for outcome in outcomes])
        low, high = bootstrap_interval(errors, units)
        rate = error_rate(errors.sum(), units.sum())
        return ErrorRate(int(errors.sum()), int(units.sum()), len(outcomes), rate, low, high)

    def _normalised(self, text: str) -> str:
        text = unicodedata.normalize("NFC", text)
        if self.ignore_case:
            text = text.casefold()
        if self.ignore_punctuation:
            text = "".join(character for character in text if not unicodedata.category(character).startswith("P"))
        return " ".join(text.split())

    def to_dict(self) -> JsonObject:
        """Fields by name, and what is counted."""
        return {"measure": self.title, **asdict(self)}

    @property
    def title(self) -> str:
        """Name of what is counted, such as `accuracy` or `word error rate`."""
        return METRICS[self.metric]


def error_rate(errors: float, units: float) -> float:
    """Errors over units; of answers that are all expected to be empty, 0 when they are and 1 when they are not."""
    if units:
        return float(errors / units)
    return float(errors > 0)


def bootstrap_interval(errors: np.ndarray, units: np.ndarray) -> tuple[float, float]:
    """The middle 95 % of error rates over as many answers drawn with replacement (Bisani and Ney 2004, ICASSP).

    Args:
        errors: Of each answer, shape (n,).
        units: Of each expected answer, shape (n,).
    """
    draw = np.random.default_rng(0)
    rates = []
    for _ in range(_DRAWS):
        rows = draw.integers(0, len(errors), len(errors))
        rates.append(error_rate(errors[rows].sum(), units[rows].sum()))
    low, high = np.quantile(rates, [0.025, 0.975])
    return float(low), float(high)


def wilson_interval(correct: int, n: int) -> tuple[float, float]:
    """95 % bounds of a proportion by Wilson's score interval (Wilson 1927, JASA 22, p. 209); right at 0 and 1 too.

    Raises:
        ValueError: `n` is not positive.
    """
    if n <= 0:
        raise ValueError("no trials")
    share, z = correct / n, Z_95
    centre = share + z * z / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    denominator = 1 + z * z / n
    low, high = max(0.0, (centre - spread) / denominator), min(1.0, (centre + spread) / denominator)
    if correct == 0:  # rounding would leave a trace of 0, and of 1
        low = 0.0
    if correct == n:
        high = 1.0
    return low, high
