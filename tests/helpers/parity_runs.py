"""Plans that must equal one process, and faults that must be found: all of a test file that take as many processes run
in one start of them, in fp64, through the real trainer.

A test file holds its table as `RUNS`; ranks import the file and find it there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import pytest

from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.distributed import module_of, run_ranks
from tests.helpers.parity import ParityError, StepRecord, compare_steps
from tests.helpers.planned_steps import overrides, planted, train_steps
from tests.helpers.schedules import case as case_param
from tests.helpers.schedules import is_possible

BATCH_LIMIT_S = 1500.0
Yamls = Mapping[str, str]
"""Family → the YAML of its run."""


class Case(NamedTuple):
    """A way to train a model."""

    model: str
    """A family, and a kind of it where a blank follows."""
    ranks: int
    data_ranks: int
    accumulation: int
    words: tuple[str, ...] = ()
    """Overrides that one process is not told."""


class Fault(NamedTuple):
    """A fault in a case."""

    case: str
    planted: str | Callable[[], AbstractContextManager[Any]]
    """How, or its name in `planned_steps`."""


@dataclass(frozen=True)
class ParityRuns:
    """The table of a test file.

    Args:
        file: The test file.
        cases: Name → what must equal one process.
        slow: More of them, marked `slow`.
        faults: Name → what must be found.
        slow_faults: More of them, marked `slow`.
        kinds: Kind of a model → overrides, which one process is told too.
        accumulated: Model → micro-batches of one process, where they matter.
        steps: From a YAML and overrides to the steps of this rank.
        tolerance: Bound on every deviation.
    """

    file: str
    cases: Mapping[str, Case]
    slow: Mapping[str, Case] = field(default_factory=dict)
    faults: Mapping[str, Fault] = field(default_factory=dict)
    slow_faults: Mapping[str, Fault] = field(default_factory=dict)
    kinds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    accumulated: Mapping[str, int] = field(default_factory=dict)
    steps: Callable[[str, list[str]], list[StepRecord]] = train_steps
    tolerance: float = 1e-9

    def case_params(self) -> list[object]:
        """Names of cases, as parameters of a test."""
        quick = [case_param(name, case.words) for name, case in self.cases.items()]
        return quick + [case_param(name, case.words, pytest.mark.slow) for name, case in self.slow.items()]

    def fault_params(self) -> list[object]:
        """Names of faults, as parameters of a test."""
        quick = [case_param(name, self._all[fault.case].words) for name, fault in self.faults.items()]
        slow = self.slow_faults.items()
        return quick + [case_param(name, self._all[fault.case].words, pytest.mark.slow) for name, fault in slow]

    def check(self, name: str, yamls: Yamls) -> None:
        """The case equals one process, on every rank."""
        expected = self.reference(self._all[name].model, yamls, name in self.slow)
        for measured in self.measured(name, yamls):
            compare_steps(expected, measured, self.tolerance)

    def check_fault(self, name: str, yamls: Yamls) -> None:
        """With the fault planted, the same comparison fails."""
        is_slow = name in self.slow_faults
        case = self._all[(self.slow_faults if is_slow else self.faults)[name].case]
        measured = self._measured(case.ranks, yamls, is_slow)[0][name]
        with pytest.raises(ParityError):
            compare_steps(self.reference(case.model, yamls, is_slow), measured, self.tolerance)

    def reference(self, model: str, yamls: Yamls, is_slow: bool = False) -> list[StepRecord]:
        """One process."""
        return self._measured(1, yamls, is_slow)[0][f"one process: {model}"]

    def measured(self, name: str, yamls: Yamls) -> list[list[StepRecord]]:
        """The steps of a case, by rank."""
        return [found[name] for found in self._measured(self._all[name].ranks, yamls, name in self.slow)]

    def run(self, ranks: int, yamls: Yamls, is_slow: bool) -> dict[str, list[StepRecord]]:
        """On each rank: every case and fault that takes this many; one rank: what the others are compared with, too."""
        cases, faults = (self.slow, self.slow_faults) if is_slow else (self.cases, self.faults)
        used = [*cases.values(), *(self._all[fault.case] for fault in faults.values())]
        found = {}
        with keeping_double():
            for model in dict.fromkeys(case.model for case in used if ranks == 1):
                alone = Case(model, 1, 1, self.accumulated.get(model, 1))
                found[f"one process: {model}"] = self._steps_of(alone, yamls)
            for name, case in cases.items():
                if case.ranks == ranks and is_possible(case.words):
                    found[name] = self._steps_of(case, yamls)
            for name, fault in faults.items():
                case = self._all[fault.case]
                if case.ranks == ranks and is_possible(case.words):
                    with planted(fault.planted) if isinstance(fault.planted, str) else fault.planted():
                        found[name] = self._steps_of(case, yamls)
        return found

    def _steps_of(self, case: Case, yamls: Yamls) -> list[StepRecord]:
        family, _, kind = case.model.partition(" ")
        words = dict.fromkeys((*self.kinds.get(kind, ()), *case.words))
        return self.steps(yamls[family], overrides(case.data_ranks, case.accumulation, *words))

    def _measured(self, ranks: int, yamls: Yamls, is_slow: bool) -> list[dict[str, list[StepRecord]]]:
        return _measured(self.file, ranks, tuple(yamls.items()), is_slow)

    @property
    def _all(self) -> dict[str, Case]:
        return {**self.cases, **self.slow}


@cache
def _measured(
    file: str, ranks: int, yamls: tuple[tuple[str, str], ...], is_slow: bool
) -> list[dict[str, list[StepRecord]]]:
    return run_ranks(ranks, run_on_a_rank, file, ranks, dict(yamls), is_slow, timeout_s=BATCH_LIMIT_S)


def run_on_a_rank(file: str, ranks: int, yamls: dict[str, str], is_slow: bool) -> dict[str, list[StepRecord]]:
    """What the table of a test file gives on this rank."""
    return module_of(file).RUNS.run(ranks, yamls, is_slow)
