"""Rounds in which contenders and a floor run as processes at the same time, in turns of a fraction of a second.

On a shared machine the floor's own time changes by a third from one run to the next. In turns, whatever slows one slows
all, so that every round counts and its ratios hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.processes import Finished, run_in_turns
from benchmarks.rounds import spread

FLOOR = "floor"


@dataclass(frozen=True)
class Contender:
    """A command, and what a round keeps of it once it has ended: a dict whose `value` is what is compared."""

    command: Sequence[str]
    finish: Callable[[Finished], dict[str, Any]]


@dataclass
class Turns:
    """Collects rounds of everyone.

    Args:
        floor: Makes what the others are compared with.
        contenders: Make the others, by name.
        timeout_s: The most seconds that each may run.
    """

    floor: Callable[[], Contender]
    contenders: Mapping[str, Callable[[], Contender]]
    timeout_s: float
    rounds: list[dict[str, dict[str, Any]]] = field(default_factory=list)

    def measure(self, rounds: int) -> None:
        """Run everyone so many times. Who begins changes from round to round."""
        makers = list({FLOOR: self.floor, **self.contenders}.items())
        for number in range(rounds):
            first = number % len(makers)
            everyone = {name: make() for name, make in [*makers[first:], *makers[:first]]}
            commands = {name: contender.command for name, contender in everyone.items()}
            ended = run_in_turns(commands, timeout_s=self.timeout_s)
            self.rounds.append({name: everyone[name].finish(ended[name]) for name in dict(makers)})
            print("  " + ", ".join(f"{name} {run['value']:.4g}" for name, run in self.rounds[-1].items()), flush=True)

    def runs(self, name: str) -> list[dict[str, Any]]:
        """One contender's runs."""
        return [one[name] for one in self.rounds]

    def everyone(self) -> list[dict[str, Any]]:
        """All runs of all."""
        return [run for one in self.rounds for run in one.values()]

    def ratios(self, name: str) -> list[float]:
        """Contender over floor, for each round."""
        return [one[name]["value"] / one[FLOOR]["value"] for one in self.rounds]

    def summary(self) -> dict[str, Any]:
        """Median, lowest and highest ratio by contender, and every run."""
        return {
            "rule": "the processes of a round run at the same time, in turns; each round gives one ratio",
            "ratio_to_floor": {name: spread(self.ratios(name)) for name in self.contenders},
            "contenders": {name: spread([run["value"] for run in self.runs(name)]) for name in self.contenders},
            "floor": spread([run["value"] for run in self.runs(FLOOR)]),
            "rounds": self.rounds,
        }
