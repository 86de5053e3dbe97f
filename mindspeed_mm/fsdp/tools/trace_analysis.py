"""What a trace says: where the time of the steps went, which operators, parts and modules took it, rank by rank.

Every moment of a step is counted once. With an accelerator in the trace: its computation first, then communication
that no computation hides, then copies; what is left is idle, and of that the wait for data. Without one: the wait for
data first, then the same order among the host's operators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.tools import intervals
from mindspeed_mm.fsdp.tools.intervals import Intervals
from mindspeed_mm.fsdp.tools.trace_columns import Kind, TraceColumns, read_columns
from mindspeed_mm.fsdp.tools.trace_nesting import Nesting, nest
from mindspeed_mm.fsdp.utils import ranges

DATA, COPY_IN, COPY_OUT = "data loading", "host to device", "device to host"
COMPUTE, COMMUNICATION, IDLE = "compute", "communication", "idle"
SHARES = (COMPUTE, COMMUNICATION, COPY_IN, COPY_OUT, DATA, IDLE)
SHORT_KERNEL_S = 10e-6
"""A kernel below it costs less time than its launch."""
_LOADERS = ("enumerate(DataLoader)",)
"""What torch calls the wait for its own data loader."""
_STEP_OF_TORCH = "ProfilerStep#"


Numbers = NDArray[np.int64]


class Seconds(dict[str, float]):
    """Name → seconds, 0 for a name that is not there."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def add(self, other: Mapping[str, float]) -> None:
        """Add up name by name."""
        for name, seconds in other.items():
            self[name] += seconds

    def top(self, count: int) -> list[tuple[str, float]]:
        """Return the `count` largest entries as (name, seconds), the largest first."""
        return sorted(self.items(), key=lambda item: -item[1])[:count]


@dataclass
class Times:
    """Where the time of one rank, or of several added up, went. Seconds."""

    window: float = 0.0
    """Length of the steps."""
    steps: int = 0
    shares: Seconds = field(default_factory=Seconds)
    """Seconds of each of `SHARES`; their sum is the window."""
    communication: float = 0.0
    hidden: float = 0.0
    """Seconds of communication during which something was computed."""
    operators: Seconds = field(default_factory=Seconds)
    """Operator on the host → time of its own, without what it called."""
    calls: Counter[str] = field(default_factory=Counter)
    kernels: Seconds = field(default_factory=Seconds)
    """Kernel on the device → time."""
    kernel_calls: Counter[str] = field(default_factory=Counter)
    short_kernels: int = 0
    phases: dict[str, Seconds] = field(default_factory=dict)
    """Part of the step → `host`: how long it lasted, `work`: what it gave to do."""
    modules: Seconds = field(default_factory=Seconds)
    """Innermost module → work of its forward and backward passes."""
    has_device: bool = False

    def add(self, other: Times) -> None:
        """Add up files of one rank."""
        self.window += other.window
        self.steps += other.steps
        self.communication += other.communication
        self.hidden += other.hidden
        self.short_kernels += other.short_kernels
        self.has_device |= other.has_device
        self.calls.update(other.calls)
        self.kernel_calls.update(other.kernel_calls)
        self.shares.add(other.shares)
        self.operators.add(other.operators)
        self.kernels.add(other.kernels)
        self.modules.add(other.modules)
        for phase, times in other.phases.items():
            self.phases.setdefault(phase, Seconds()).add(times)

    @property
    def busy(self) -> float:
        """Time not spent waiting for other ranks."""
        return self.window - self.shares[COMMUNICATION]

    @property
    def shares_of_window(self) -> dict[str, float]:
        """The parts of the window that `shares` are; 0 of a window without length."""
        return {name: self.shares[name] / (self.window or 1.0) for name in SHARES}


@dataclass(frozen=True)
class Analysis:
    """Several ranks of one run."""

    ranks: dict[int, Times]
    files: int

    @property
    def total(self) -> Times:
        """Times of all ranks, added up name by name."""
        total = Times()
        for times in self.ranks.values():
            total.add(times)
        return total

    @property
    def slowest(self) -> int:
        """The rank that the others wait for: the one that itself waits least in communication."""
        return max(self.ranks, key=lambda rank: self.ranks[rank].busy / max(self.ranks[rank].steps, 1))

    @property
    def imbalance(self) -> float:
        """How much more the slowest rank had to do than the mean: 0.1 is 10 %."""
        busy = [times.busy / max(times.steps, 1) for times in self.ranks.values()]
        mean = sum(busy) / len(busy)
        if mean:
            return max(busy) / mean - 1
        return 0.0

    def to_dict(self, top: int) -> dict[str, object]:
        """Return the analysis as JSON values, with the `top` largest operators, kernels and modules of each rank."""
        return {
            "files": self.files,
            "slowest_rank": self.slowest,
            "imbalance": self.imbalance,
            "ranks": {str(rank): _times_dict(times, top) for rank, times in sorted(self.ranks.items())},
        }


def _times_dict(times: Times, top: int) -> dict[str, object]:
    hidden = times.hidden / times.communication if times.communication else None
    operators, kernels = [], []
    for name, seconds in times.operators.top(top):
        operators.append({"name": name, "self_s": seconds, "calls": times.calls[name]})
    for name, seconds in times.kernels.top(top):
        kernels.append({"name": name, "s": seconds, "calls": times.kernel_calls[name]})
    return {
        "steps": times.steps,
        "step_s": times.window / max(times.steps, 1),
        "shares": times.shares_of_window,
        "communication_s": times.communication,
        "communication_hidden": hidden,
        "operators": operators,
        "kernels": kernels,
        "short_kernels": times.short_kernels,
        "phases": {name: dict(spent) for name, spent in times.phases.items()},
        "modules": [{"name": n, "s": s} for n, s in times.modules.top(top)],
    }


def find_traces(path: Path) -> list[Path]:
    """The traces meant by a file, or by a folder: those in it, or below it.

    Raises:
        DataError: There is none.
    """
    if path.is_file():
        return [path]
    names = ("*.trace.json.gz", "*.trace.json", "*.pt.trace.json*", "trace_view.json")
    for pattern in ("", "**/"):
        found: set[Path] = set()
        for name in names:
            found.update(trace for trace in path.glob(pattern + name) if not trace.name.startswith("."))
        if found:
            return sorted(found)
    what = "holds no trace" if path.is_dir() else "does not exist"
    raise DataError(what, where=str(path), way_out="Give a trace, or the folder that tools.profile wrote it to.")


def analyse(path: Path) -> Analysis:
    """Analyse a trace, or all those of a folder.

    Raises:
        DataError: There is none, or one cannot be read.
    """
    return analyse_files(find_traces(path))


def analyse_files(paths: Sequence[Path]) -> Analysis:
    """Analyse traces; files of the same rank are added up."""
    found: dict[int, Times] = {}
    for path in paths:
        columns = read_columns(path)
        rank = columns.rank
        if rank is None:  # the trace does not say: it is one of its own
            rank = max(found, default=-1) + 1
        found.setdefault(rank, Times()).add(analyse_columns(columns))
    return Analysis(found, len(paths))


def analyse_columns(columns: TraceColumns) -> Times:
    """Analyse the events of one trace file; all times are in seconds."""
    nesting = nest(columns)
    window, steps = _window(columns)
    times = Times(window=intervals.length(window), steps=steps, has_device=columns.has_device)
    _share_out(columns, window, times)
    _count_operators(columns, nesting, window, times)
    _count_phases(columns, nesting, times)
    _count_modules(columns, nesting, window, times)
    return times


# --- shares --------------------------------------------------------------------------------------------------------


def _window(columns: TraceColumns) -> tuple[Intervals, int]:
    """The moments of the steps, and how many they are; of a trace that names none: from its first event to its last."""
    for prefix in (ranges.STEP, _STEP_OF_TORCH):
        named = _stretches_named(columns, prefix)
        if len(named):
            return intervals.union(columns.begin[named], columns.end[named]), len(set(columns.name[named].tolist()))
    known = columns.kind != Kind.OTHER
    return np.array([[columns.begin[known].min(), columns.end[known].max()]]), 1


def _stretches_named(columns: TraceColumns, *prefixes: str) -> NDArray[np.int64]:
    """Stretches of the host whose names begin so."""
    fits = np.array([name.startswith(prefixes) for name in columns.names], dtype=bool)
    return np.flatnonzero((columns.kind == Kind.RANGE) & fits[columns.name])


def _covered(columns: TraceColumns, events: NDArray[np.int64] | NDArray[np.bool_]) -> Intervals:
    return intervals.union(columns.begin[events], columns.end[events])


def _share_out(columns: TraceColumns, window: Intervals, times: Times) -> None:
    waits = _covered(columns, _stretches_named(columns, ranges.DATA_WAIT, *_LOADERS))
    compute, communication = _work(columns)
    copy_in = _covered(columns, columns.kind == Kind.TO_DEVICE)
    copy_out = _covered(columns, columns.kind == Kind.FROM_DEVICE)
    times.communication = intervals.length(intervals.common(communication, window))
    times.hidden = intervals.length(intervals.common(intervals.common(communication, window), compute))
    order = [(COMPUTE, compute), (COMMUNICATION, communication), (COPY_IN, copy_in), (COPY_OUT, copy_out)]
    if columns.has_device:
        order.append((DATA, waits))
    else:
        order[0:0] = [(DATA, waits), (COPY_IN, _covered(columns, _stretches_named(columns, ranges.TO_DEVICE)))]
    left = window
    for name, moments in order:
        after = intervals.minus(left, moments)
        times.shares[name] += intervals.length(left) - intervals.length(after)
        left = after
    times.shares[IDLE] = intervals.length(left)


def _work(columns: TraceColumns) -> tuple[Intervals, Intervals]:
    """When something is computed, and when something is communicated."""
    if columns.has_device:
        on_device = (columns.kind == Kind.COMMUNICATION) & ~_on_host(columns)
        return _covered(columns, columns.kind == Kind.COMPUTE), _covered(columns, on_device)
    is_work = np.array([_is_operator(name) for name in columns.names], dtype=bool)[columns.name]
    compute, communication = [intervals.NONE], [intervals.NONE]
    for lane in range(len(columns.lanes)):
        here = columns.lane == lane
        collectives = _covered(columns, here & (columns.kind == Kind.COMMUNICATION))
        operators = _covered(columns, here & (columns.kind == Kind.OPERATOR) & is_work)
        compute.append(intervals.minus(operators, collectives))  # sums inside of a collective are part of it
        communication.append(collectives)
    return intervals.merged(*compute), intervals.merged(*communication)


def _on_host(columns: TraceColumns) -> NDArray[np.bool_]:
    """Events of lanes in which the host's operators and stretches stand."""
    is_host = np.zeros(len(columns.lanes), dtype=bool)
    is_host[columns.lane[(columns.kind == Kind.OPERATOR) | (columns.kind == Kind.RANGE)]] = True
    return is_host[columns.lane]


def _is_operator(name: str) -> bool:
    """Whether the name is of an operator itself, not of what autograd puts around it, where waits hide."""
    return "::" in name and not name.startswith(("autograd::", "torch::autograd"))


# --- operators, parts, modules -------------------------------------------------------------------------------------


def _count_operators(columns: TraceColumns, nesting: Nesting, window: Intervals, times: Times) -> None:
    inside = intervals.locate(window, columns.begin) >= 0
    on_host = np.flatnonzero(inside & (columns.kind == Kind.OPERATOR))
    _tally(columns, on_host, nesting.own_time[on_host], times.operators, times.calls)
    kinds = (Kind.COMPUTE, Kind.COMMUNICATION, Kind.TO_DEVICE, Kind.FROM_DEVICE)
    on_device = np.flatnonzero(inside & np.isin(columns.kind, kinds) & ~_on_host(columns))
    if columns.has_device:
        lengths = columns.end[on_device] - columns.begin[on_device]
        _tally(columns, on_device, lengths, times.kernels, times.kernel_calls)
        times.short_kernels = int((lengths[columns.kind[on_device] == Kind.COMPUTE] < SHORT_KERNEL_S).sum())


def _tally(
    columns: TraceColumns,
    events: NDArray[np.int64],
    seconds: NDArray[np.float64],
    times: Seconds,
    calls: Counter[str],
) -> None:
    sums = np.bincount(columns.name[events], weights=seconds, minlength=len(columns.names))
    counts = np.bincount(columns.name[events], minlength=len(columns.names))
    for number in np.flatnonzero(counts):
        times[columns.names[number]] += float(sums[number])
        calls[columns.names[number]] += int(counts[number])


def _work_events(columns: TraceColumns, nesting: Nesting) -> tuple[Numbers, NDArray[np.float64], Numbers]:
    """(events that do the work, seconds of each, the host's operator that gave each, -1: unknown)."""
    if not columns.has_device:
        operators = np.flatnonzero(columns.kind == Kind.OPERATOR)
        return operators, nesting.own_time[operators], operators
    kinds = (Kind.COMPUTE, Kind.COMMUNICATION)
    events = np.flatnonzero(np.isin(columns.kind, kinds) & ~_on_host(columns))
    return events, columns.end[events] - columns.begin[events], nesting.giver(columns, columns.external[events])


def _count_phases(columns: TraceColumns, nesting: Nesting, times: Times) -> None:
    events, seconds, givers = _work_events(columns, nesting)
    given_at = np.where(givers >= 0, columns.begin[givers], columns.begin[events])
    for phase in ranges.PHASES:
        named = [event for event in _stretches_named(columns, phase) if columns.names[columns.name[event]] == phase]
        if named:
            stretches = _covered(columns, np.array(named))
            work = float(seconds[intervals.locate(stretches, given_at) >= 0].sum())
            times.phases[phase.removeprefix("mm.")] = Seconds(host=intervals.length(stretches), work=work)


def _count_modules(columns: TraceColumns, nesting: Nesting, window: Intervals, times: Times) -> None:
    if not nesting.modules:
        return
    events, seconds, givers = _work_events(columns, nesting)
    inside = (intervals.locate(window, columns.begin[events]) >= 0) & (givers >= 0)
    numbers = nesting.module[givers[inside]]
    sums = np.bincount(numbers + 1, weights=seconds[inside], minlength=len(nesting.modules) + 1)
    for number, module in enumerate(nesting.modules):
        if sums[number + 1]:
            times.modules[module] += float(sums[number + 1])
