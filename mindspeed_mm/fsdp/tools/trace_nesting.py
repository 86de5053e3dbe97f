"""Who called whom in a trace: operators inside operators, and the module that each belongs to.

Events of one thread nest. An operator of a backward pass bears the number of the forward operator it answers
(`Sequence number`), and so finds the module of that one.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mindspeed_mm.fsdp.tools.trace_columns import Kind, TraceColumns
from mindspeed_mm.fsdp.utils.ranges import MODULE

_ANSWER = "autograd::engine::evaluate_function"
"""What autograd puts around the backward pass of one operator."""


@dataclass(frozen=True)
class Nesting:
    """For each event of the columns."""

    own_time: NDArray[np.float64]
    """Seconds without those of the operators that it called; of operators only."""
    module: NDArray[np.int32]
    """Number of the innermost module; -1: in none, or unknown."""
    modules: list[str]
    """Names of the modules."""
    linked: NDArray[np.int64]
    """Operators by their external ids."""

    def giver(self, columns: TraceColumns, external: NDArray[np.int64]) -> NDArray[np.int64]:
        """The host's operator that gave each device event its work; -1: unknown."""
        if not len(self.linked):
            return np.full(len(external), -1, dtype=np.int64)
        known = columns.external[self.linked]
        at = np.minimum(np.searchsorted(known, external), len(known) - 1)
        return np.where((external >= 0) & (known[at] == external), self.linked[at], -1)


def nest(columns: TraceColumns) -> Nesting:
    """Find who called whom. Of a forward pass first, whose modules backward passes look up."""
    count = len(columns.begin)
    own = columns.end - columns.begin
    module = np.full(count, -1, dtype=np.int32)
    on_host = np.isin(columns.kind, (Kind.OPERATOR, Kind.RANGE, Kind.COMMUNICATION))
    host = np.flatnonzero(on_host)
    # A caller begins with, or before, what it calls, and ends after it.
    host = host[np.lexsort((-columns.end[host], columns.begin[host], columns.lane[host]))]
    order = array("q", host.tobytes())
    walk = _Walk(columns, own, module)
    for event in order:
        walk.visit(event)
    walk.answer_backward(order)
    is_operator = columns.kind == Kind.OPERATOR
    linked = np.flatnonzero(is_operator & (columns.external >= 0))
    linked = linked[np.argsort(columns.external[linked], kind="stable")]
    return Nesting(np.where(is_operator, own, 0.0), module, walk.modules, linked)


class _Walk:
    """One look at each event, thread by thread, in the order of time."""

    def __init__(self, columns: TraceColumns, own: NDArray[np.float64], module: NDArray[np.int32]) -> None:
        # Plain arrays: single numbers of theirs are had three times faster than numpy's.
        self._begin, self._end = array("d", columns.begin.tobytes()), array("d", columns.end.tobytes())
        self._lane, self._name = array("i", columns.lane.tobytes()), array("i", columns.name.tobytes())
        self._kind, self._sequence = array("b", columns.kind.tobytes()), array("q", columns.sequence.tobytes())
        self._own, self._module = own, module
        numbers: dict[str, int] = {}
        self._module_of_name = [-1] * len(columns.names)
        for place, name in enumerate(columns.names):
            if name.startswith(MODULE):
                self._module_of_name[place] = numbers.setdefault(name.removeprefix(MODULE), len(numbers))
        self.modules = list(numbers)
        self._is_answer = [name.startswith(_ANSWER) for name in columns.names]
        self._stack: list[int] = []
        self._of_sequence: dict[int, int] = {}

    def visit(self, event: int) -> None:
        """Find the caller, take this event's time from it, and inherit its module."""
        stack = self._stack
        while stack and (self._lane[stack[-1]] != self._lane[event] or self._end[stack[-1]] <= self._begin[event]):
            stack.pop()
        module = self._module_of_name[self._name[event]]
        if stack:
            if module < 0:
                module = int(self._module[stack[-1]])
            self._take_from_caller(event)
        self._module[event] = module
        if module >= 0 and self._sequence[event] >= 0:
            self._of_sequence[int(self._sequence[event])] = module  # the last to bear the number made the node
        stack.append(event)

    def _take_from_caller(self, event: int) -> None:
        """Stretches are transparent: an operator's caller is the next operator outside."""
        if self._kind[event] == Kind.RANGE:
            return
        for caller in reversed(self._stack):
            if self._kind[caller] != Kind.RANGE:
                inside = min(self._end[event], self._end[caller]) - self._begin[event]
                self._own[caller] -= inside
                return

    def answer_backward(self, order: array[int]) -> None:
        """What runs inside the answer to a forward operator belongs to that one's module."""
        if not self.modules:
            return
        answer, until, lane = -1, 0.0, -1
        for event in order:
            if self._is_answer[self._name[event]]:
                answer = self._of_sequence.get(int(self._sequence[event]), -1)
                until, lane = self._end[event], self._lane[event]
            if self._module[event] < 0 and lane == self._lane[event] and self._begin[event] < until:
                self._module[event] = answer
