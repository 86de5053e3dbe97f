"""Makes the books of a whole step out of those of a step in which blocks of a kind were left out.

Of each run of blocks some periods were simulated, and behind them the model went on as if it had no more. The events
of a block (its forward pass, its backward pass, what is done at the end for its parameters) refer to entries of its
own and of its neighbours. Where two neighbours in the middle did the same, entry by entry, those that were left out do
the same, too: they are written between the two. Which two may differ from work to work: what the last block hands to
the one before it in the backward pass is often special, and what the first block hands on in the forward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mindspeed_mm.fsdp.tools.memory_model.ledger import BookedWork, Label, Log

Work = tuple[str, int]
"""What a block does, and for which time."""
_Fate = tuple[int, Work]
"""Where an entry is freed: how many blocks further, and in which work."""
_Name = tuple[Label, int, _Fate, int]
"""An entry among those of its segment: label, bytes, fate, and how many alike are freed before it. Which of those that
are alike in all three is freed when makes no difference to the books; and what only the first or the last of some
blocks does, such as to begin a sum that the others add to, changes no name of what all of them do."""


class NotAlike(Exception):
    """Blocks that were taken for one kind are not, or nobody can tell."""


@dataclass(frozen=True)
class SimulatedRun:
    """Blocks that were simulated for others behind them."""

    blocks: tuple[str, ...]
    """Some whole periods: as many as `kinds.simulated_periods`."""
    period: int
    copies: int
    """Periods that were left out."""


def unrolled(log: Log, runs: Sequence[SimulatedRun]) -> Log:
    """The books with what was left out.

    Args:
        log: Of one rank; `places` say which block an event belongs to.
        runs: Of all ranks; a rank of a pipeline has some of the blocks.

    Raises:
        NotAlike: The periods in the middle of a run differ.
    """
    seen = {place.block for _, place in log.places}
    own = [run for run in runs if run.copies and seen.issuperset(run.blocks)]
    if own:
        return _Unrolling(log, own).written()
    return log


class _Segment(NamedTuple):
    """Events that follow one another, of one block, or of none."""

    start: int
    end: int
    run: int
    """-1: of no run."""
    block: int
    """Position in the run."""
    work: Work


def _is_middle(segment: _Segment, run: SimulatedRun) -> bool:
    return run.period <= segment.block < len(run.blocks) - run.period


class _Unrolling:
    def __init__(self, log: Log, runs: Sequence[SimulatedRun]) -> None:
        self._log, self._runs = log, runs
        self._segments = self._cut()
        self._born: dict[int, int] = {}
        """Entry → the segment that takes it."""
        self._died: dict[int, int] = {}
        self._names: dict[int, _Name] = {}
        """Of all entries that are freed."""
        self._follow()
        self._copied: dict[int, tuple[int, list[int], bool]] = {}
        """Segment → the run whose copies are written in front of it, the segments of one, and whether they ascend."""
        self._behind: dict[tuple[int, Work], int] = {}
        """Run and work → the first block behind the copies."""
        for run in range(len(runs)):
            self._compare(run)
        self._new = Log()
        self._entries: dict[int, int] = {}
        """Number of an entry in events of the books as they are → in those of the new ones."""
        self._made: dict[tuple[int, int, Work, _Name], int] = {}
        """Number of a run, block among all of it, work, name → number in events of the new books, until it is freed."""

    def _cut(self) -> list[_Segment]:
        """The events, segment by segment."""
        where: dict[str, tuple[int, int]] = {}
        for number, run in enumerate(self._runs):
            where |= {name: (number, position) for position, name in enumerate(run.blocks)}
        places = [(0, BookedWork("", 0, "")), *self._log.places]
        ends = [start for start, _ in places[1:]] + [len(self._log.events)]
        found: list[_Segment] = []
        for (start, place), end in zip(places, ends, strict=True):
            found.append(_Segment(start, end, *where.get(place.block, (-1, -1)), (place.work, place.number)))
        return found

    def _follow(self) -> None:
        """Find where entries come from and where they go."""
        log, alike = self._log, Counter[tuple[int, Label, int, _Fate]]()
        for number, segment in enumerate(self._segments):
            for event in log.events[segment.start : segment.end]:
                entry = abs(event) - 1
                if event > 0:
                    self._born[entry] = number
                    continue
                born = self._born[entry]
                fate = segment.block - self._segments[born].block, segment.work
                label, size = log.labels[entry], log.sizes[entry]
                self._died[entry] = number
                self._names[entry] = label, size, fate, alike[born, label, size, fate]
                alike[born, label, size, fate] += 1

    # --- are they alike -----------------------------------------------------------------------------------------------

    def _compare(self, number: int) -> None:
        """Find where copies of a run's periods go."""
        run = self._runs[number]
        period = run.period
        by_work: dict[Work, dict[int, int]] = {}
        for place, segment in enumerate(self._segments):
            if segment.run == number:
                of_work = by_work.setdefault(segment.work, {})
                if segment.block in of_work:
                    raise NotAlike(f"{run.blocks[segment.block]} did '{segment.work[0]}' twice")
                of_work[segment.block] = place
                self._check_neighbours(segment, run)
        for work, of_work in by_work.items():
            alike = []
            for behind in range(2 * period, len(run.blocks) - period, period):
                first = [of_work[block] for block in range(behind - period, behind) if block in of_work]
                second = [of_work[block] for block in range(behind, behind + period) if block in of_work]
                if list(map(self._taken, first)) != list(map(self._taken, second)):
                    raise NotAlike(f"{run.blocks[behind]} and one before it differ in what '{work[0]}' takes")
                if self._are_alike(first, second):
                    alike.append((behind, first, second))
            if not alike:
                raise NotAlike(f"{run.blocks[period]} and those behind it differ in '{work[0]}'")
            self._behind[number, work], first, second = alike[0]
            if first:
                ascends = min(first) < min(second)
                self._copied[min(second) if ascends else min(first)] = (number, sorted(second), ascends)

    def _taken(self, number: int) -> list[tuple[Label, int]]:
        """Label and bytes of each entry that a segment takes, in order."""
        segment, log = self._segments[number], self._log
        taken = [event - 1 for event in log.events[segment.start : segment.end] if event > 0]
        return [(log.labels[entry], log.sizes[entry]) for entry in taken]

    def _are_alike(self, first: Sequence[int], second: Sequence[int]) -> bool:
        """Whether the segments of two periods follow one another, and do the same."""
        both = sorted([*first, *second])
        if len(first) != len(second) or (both and both[-1] - both[0] != len(both) - 1):
            return False
        return all(self._described(mine) == self._described(other) for mine, other in zip(first, second, strict=True))

    def _check_neighbours(self, segment: _Segment, run: SimulatedRun) -> None:
        """What blocks in the middle take and free is theirs, or of blocks a period away at most."""
        if not _is_middle(segment, run):
            return
        for event in self._log.events[segment.start : segment.end]:
            other = self._other_end(event)
            if other is None or self._is_near(segment, other):
                continue
            label = self._log.labels[abs(event) - 1]
            raise NotAlike(
                f"{run.blocks[segment.block]} in '{segment.work[0]}' takes or frees {label.category} of "
                f"{label.module or 'none'}, which '{other.work[0]}' of {other.block} in {other.run} frees or takes"
            )

    def _other_end(self, event: int) -> _Segment | None:
        """Where an entry that is taken is freed, or the other way round; None: it stays."""
        if event < 0:
            return self._segments[self._born[-event - 1]]
        if event - 1 in self._died:
            return self._segments[self._died[event - 1]]
        return None

    def _is_near(self, segment: _Segment, other: _Segment) -> bool:
        """Whether two segments are of blocks of a run a period apart at most. What a run's first blocks and its last
        have to do with each other, they have to do as the first and the last."""
        if segment.run < 0 or segment.run != other.run:
            return False
        return abs(other.block - segment.block) <= self._runs[segment.run].period

    def _described(self, number: int) -> list[object]:
        """The events of a segment, as seen from its block."""
        segment, described = self._segments[number], list[object]()
        for event in self._log.events[segment.start : segment.end]:
            entry = abs(event) - 1
            name = self._names.get(entry)
            if event > 0:
                described.append((self._log.labels[entry], self._log.sizes[entry], name and name[2]))
            else:
                described.append((self._segments[self._born[entry]].work, name))
        return described

    # --- the new books ------------------------------------------------------------------------------------------------

    def written(self) -> Log:
        """Write the books of the whole step, segment by segment, with the copies in their places."""
        starts = []
        for number, segment in enumerate(self._segments):
            if number in self._copied:
                self._write_copies(*self._copied[number])
            starts.append(len(self._new.events))
            self._write(number, self._real_block(segment))
        if self._made:
            raise NotAlike(f"what {next(iter(self._made))} takes is not freed in a block that was left out")
        moved = _Moved(self._segments, starts)
        self._new.phases = [(moved(start), phase) for start, phase in self._log.phases]
        self._new.moments = [moved(moment) for moment in self._log.moments]
        return self._new

    def _real_block(self, segment: _Segment) -> int:
        """Position of a simulated block among all of its run."""
        if segment.run < 0:
            return -1
        run = self._runs[segment.run]
        is_behind = segment.block >= self._behind[segment.run, segment.work]
        return segment.block + (run.copies * run.period if is_behind else 0)

    def _write_copies(self, run: int, segments: Sequence[int], ascends: bool) -> None:
        copies, period = self._runs[run].copies, self._runs[run].period
        for copy in range(copies) if ascends else reversed(range(copies)):
            for number in segments:
                self._write(number, self._segments[number].block + copy * period, is_copy=True)

    def _write(self, number: int, block: int, *, is_copy: bool = False) -> None:
        """Write a segment for a block of the whole run."""
        segment, new, made = self._segments[number], self._new, self._made
        run, work = segment.run, segment.work
        for event in self._log.events[segment.start : segment.end]:
            old = abs(event) - 1
            name = self._names.get(old)
            if event > 0:
                new.labels.append(self._log.labels[old])
                new.sizes.append(self._log.sizes[old])
                entry = len(new.sizes)
                new.events.append(entry)
                if name is not None and self._is_near(segment, self._segments[self._died[old]]):
                    made[run, block, work, name] = entry
                if not is_copy:
                    self._entries[event] = entry
                continue
            by = self._segments[self._born[old]]
            if name is not None and self._is_near(segment, by):
                new.events.append(-made.pop((run, block + by.block - segment.block, by.work, name)))
            else:
                new.events.append(-self._entries[-event])


class _Moved:
    """Where a position of the old books is in the new ones; positions only grow from call to call."""

    def __init__(self, segments: Sequence[_Segment], starts: Sequence[int]) -> None:
        self._segments, self._starts = segments, starts

    def __call__(self, position: int) -> int:
        for segment, start in zip(self._segments, self._starts, strict=True):
            if position <= segment.end:
                return start + position - segment.start
        raise AssertionError("a position behind the last event")
