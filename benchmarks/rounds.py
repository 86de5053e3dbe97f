"""Rounds that alternate contenders with a floor, and the rule by which a round counts.

A shared machine drifts by a tenth within seconds. Single processes run in turns (`benchmarks/turns.py`). What must run
whole, as ranks that wait for each other, stands between two runs of the floor. It counts only when the two agree within
3 % and both lie within 10 % of the best floor seen; ratios then hold. Where that is too much to ask, a benchmark says
how much wider its rule is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

AGREE_WITHIN = 0.03
NEAR_BEST_WITHIN = 0.10
ROUGH = (0.10, 0.25)
"""The same two for passes of a second, of which a busy machine lets hardly any pass. Their ratios scatter as much; it
shows in their lowest and highest."""
WILD = (0.5, 1.5)
"""The same two for ranks that wait for each other: the slower decides, and it changes. Only what is beyond all measure
is left out."""

Run = Callable[[], dict[str, Any]]
"""Runs a contender once; the dict's `value` is what is compared, the rest is kept."""


@dataclass(frozen=True)
class Round:
    """One run of a contender; `before` is the floor run that it follows, and the next floor run follows it."""

    contender: str
    before: int
    run: dict[str, Any]


@dataclass
class Rounds:
    """Collects bracketed rounds of each contender.

    Args:
        floor: What the others are compared with.
        contenders: By name.
        agree_within: How far the floors around a run that counts may be apart.
        near_best_within: How far above the best floor they may be.
    """

    floor: Run
    contenders: Mapping[str, Run]
    agree_within: float = AGREE_WITHIN
    near_best_within: float = NEAR_BEST_WITHIN
    floors: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)

    def measure(self, accepted: int, limit_s: float) -> None:
        """Alternate until every contender has `accepted` rounds that count, or the time is used up."""
        deadline = time.monotonic() + limit_s
        self.floors.append(self.floor())
        while lacking := [name for name in self.contenders if len(self.accepted(name)) < accepted]:
            for name in lacking:
                if time.monotonic() > deadline:
                    return
                self._one(name)

    def _one(self, name: str) -> None:
        one = Round(name, len(self.floors) - 1, self.contenders[name]())
        self.floors.append(self.floor())
        self.rounds.append(one)
        before, after = self._bracket(one)
        verdict = "counts" if self.counts(one) else "does not count"
        print(
            f"  {name}: {one.run['value']:.4g} between {before:.4g} and {after:.4g} of the floor ({verdict})",
            flush=True,
        )

    def counts(self, one: Round) -> bool:
        """Whether the two floors around a run agree, and are near the best floor of all."""
        before, after = self._bracket(one)
        best = min(floor["value"] for floor in self.floors)
        agree = abs(before - after) <= self.agree_within * min(before, after)
        return agree and max(before, after) <= (1 + self.near_best_within) * best

    def accepted(self, name: str) -> list[Round]:
        """The rounds of a contender that count."""
        return [one for one in self.rounds if one.contender == name and self.counts(one)]

    def ratios(self, name: str) -> list[float]:
        """Contender over the mean of its two floors, for each round that counts."""
        return [2 * one.run["value"] / sum(self._bracket(one)) for one in self.accepted(name)]

    def summary(self) -> dict[str, Any]:
        """Median, lowest and highest ratio by contender, and every run, rounds that do not count included."""
        return {
            "rule": f"a round counts when the floors around it agree within {self.agree_within:.0%} "
            f"and lie within {self.near_best_within:.0%} of the best floor",
            "ratio_to_floor": {name: spread(self.ratios(name)) for name in self.contenders},
            "contenders": {name: spread([r.run["value"] for r in self.accepted(name)]) for name in self.contenders},
            "floor": spread([floor["value"] for floor in self.floors]),
            "floor_runs": self.floors,
            "rounds": [
                {"contender": one.contender, "floor_run_before": one.before, "counts": self.counts(one), **one.run}
                for one in self.rounds
            ],
        }

    def _bracket(self, one: Round) -> tuple[float, float]:
        return self.floors[one.before]["value"], self.floors[one.before + 1]["value"]


def spread(values: list[float]) -> dict[str, Any]:
    """Median, lowest, highest and number of values."""
    if not values:
        return {"median": None, "min": None, "max": None, "n": 0}
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}
