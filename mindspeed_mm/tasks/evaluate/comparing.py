"""Two models on the same questions: which is better, and whether that may be chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.fsdp.sampling.answers.scoring import error_rate

Record = Mapping[str, Any]
Question = tuple[str, str, str]
"""Task, id, and what is asked."""
_SAMPLE = frozenset({"id", "task", "question", "expected", "given", "correct"})
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

    def in_points(self) -> tuple[str, str, str]:
        """The difference and the two ends of its interval, in percentage points with their sign."""
        points, low, high = (f"{100 * value:+.1f}" for value in (self.difference, self.low, self.high))
        return points, low, high

    def __str__(self) -> str:
        points, low, high = self.in_points()
        chance = ""
        if self.p_value is not None:
            chance = f", p = {self.p_value:.2g} by McNemar's exact test"
        return (
            f"{points} points (95 % interval {low} to {high}); better on {self.better}, worse on {self.worse} of "
            f"{self.questions} questions{chance}"
        )

    def to_dict(self) -> JsonObject:
        """Return all fields by name, as a dictionary for JSON."""
        return asdict(self)


def shares_by_group(samples: Sequence[JsonMapping]) -> dict[str, float]:
    """Group → the least share of its items, of the samples of a published set."""
    shares: dict[str, float] = {}
    for sample in samples:
        # a question is right only if all of its items are
        shares[sample["group"]] = min(sample["share"], shares.get(sample["group"], 1.0))
    return shares


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
    low, high = _interval(len(differences), lambda rows: float(differences[rows].mean()))
    p_value = None
    if not is_graded:
        p_value = mcnemar(better, worse)
    return PairedTest(len(differences), better, worse, float(differences.mean()), low, high, p_value)


def compare_rates(ours: Sequence[tuple[int, int]], theirs: Sequence[tuple[int, int]]) -> PairedTest:
    """Compare two models' rates of errors on the same questions, in the same order: (errors, units) of each. Less is
    better; the interval is that of questions drawn with replacement, both models' together.

    Raises:
        ValueError: They are other questions, or none.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError("the two were not asked the same questions")
    # (questions, 2): errors and units
    own_N2, other_N2 = np.array(ours, dtype=float), np.array(theirs, dtype=float)
    fewer = own_N2[:, 0] - other_N2[:, 0]

    def difference(rows: np.ndarray) -> float:
        own_2, other_2 = own_N2[rows].sum(axis=0), other_N2[rows].sum(axis=0)
        return error_rate(own_2[0], own_2[1]) - error_rate(other_2[0], other_2[1])

    low, high = _interval(len(ours), difference)
    whole = difference(np.arange(len(ours)))
    return PairedTest(len(ours), int((fewer < 0).sum()), int((fewer > 0).sum()), whole, low, high, None)


def by_question(samples: Iterable[Record]) -> dict[Question, Record]:
    """Samples of `mm evaluate` by task, id and question; those of other tools are left out."""
    found = {}
    for sample in samples:
        if sample.keys() >= _SAMPLE:
            found[(str(sample["task"]), str(sample["id"]), str(sample["question"]))] = sample
    return found


def compare_samples(ours: Sequence[Record], theirs: Sequence[Record]) -> PairedTest:
    """Compare two models' answers to the same questions, in the same order: by errors where both have counted them,
    else by whether answers are right.

    Raises:
        ValueError: They are other questions, or none.
    """
    if all("errors" in sample for sample in (*ours, *theirs)):
        return compare_rates(_errors_of(ours), _errors_of(theirs))
    return compare(_rightness_of(ours), _rightness_of(theirs), is_graded=False)


def _errors_of(samples: Sequence[Record]) -> list[tuple[int, int]]:
    return [(sample["errors"], sample["units"]) for sample in samples]


def _rightness_of(samples: Sequence[Record]) -> dict[str, float]:
    """Return 1.0 for each right and 0.0 for each wrong answer, by the sample's position as text."""
    return {str(place): float(bool(sample["correct"])) for place, sample in enumerate(samples)}


def mcnemar(better: int, worse: int) -> float:
    """Two-sided p-value that each question on which two models differ is as likely to favour either (McNemar 1947,
    Psychometrika 12; exact, by the binomial distribution)."""
    n = better + worse
    tail: int = sum(math.comb(n, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**n)


def _interval(n: int, difference: Callable[[np.ndarray], float]) -> tuple[float, float]:
    """The middle 95 % of differences over as many questions drawn with replacement."""
    # a fixed seed: the same answers have the same interval
    draw = np.random.default_rng(0)
    differences = [difference(draw.integers(0, n, n)) for _ in range(_DRAWS)]
    low, high = np.quantile(differences, [0.025, 0.975])
    return float(low), float(high)
