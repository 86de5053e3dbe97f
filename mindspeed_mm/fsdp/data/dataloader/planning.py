"""Which samples of a buffer share a micro-batch, and which micro-batches make a step: pure functions of sizes.

A step waits for its slowest rank, so its micro-batches should cost the same. Micro-batches are made of everything that
is buffered; those nearest in cost to the one with the oldest sample make up the step. One plan is under way while the
trainer is at another: where many samples wait, a process makes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from typing_extensions import override

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.packing import Groups, best_fit
from mindspeed_mm.fsdp.data.data_utils.sample import SampleSize
from mindspeed_mm.fsdp.data.dataloader.side_process import SideJob, SideProcess
from mindspeed_mm.fsdp.data.dataloader.transport import SLOT_BYTES, PackedBatch, SharedSlots

ATTENTION_TOKENS = 2**14
"""Tokens of a sample at which attention costs as much as everything else: 6 × the width of blocks of 2 to 3 thousand
channels. α of the cost Σ tokens + α·Σ tokens² is its reciprocal."""
PATCH_TOKENS = 0.1
"""What a patch (or an audio frame) costs an encoder, in tokens of the language model: the ratio of their parameters
(0.4 to 0.7 B of an encoder beside 4 to 8 B)."""


Indices = TypeVar("Indices", list[int], np.ndarray)
Number = TypeVar("Number", int, np.ndarray)


@dataclass(frozen=True)
class BatchShape:
    """What a micro-batch may hold.

    `packed`: samples one after the other, padding none. `padded`: rows as long as the longest. `rows`: so many samples
    of similar length, whatever their size.
    """

    kind: Literal["packed", "padded", "rows"]
    tokens: int
    """Most tokens, those of padding included; for `rows` not a limit."""
    patches: int | None = None
    """Most patches."""
    rows: int = 0
    """Samples of a micro-batch, for `rows`."""
    multiple: int = 1
    """Padded rows are a multiple of so many tokens."""

    def lookahead(self, count: int) -> int:
        """Micro-batches to buffer for steps of `count`: enough of nearly every cost to choose among (measured:
        `benchmarks/batches.py`). Fixed numbers of rows differ in cost far more than filled budgets do."""
        return 3 * count + (256 if self.kind == "rows" else 16)

    def padded(self, tokens: Number) -> Number:
        """Tokens of a row of its own."""
        if self.kind == "packed":
            return tokens
        return -(-tokens // self.multiple) * self.multiple  # rounded up

    def fitting(self, sizes: np.ndarray) -> np.ndarray:
        """(samples,) whether each fits a micro-batch of its own.

        Args:
            sizes: (samples, 2) tokens and patches.
        """
        fits = np.ones(len(sizes), dtype=bool) if self.kind == "rows" else self.padded(sizes[:, 0]) <= self.tokens
        if self.patches is None:
            return fits
        return fits & (sizes[:, 1] <= self.patches)

    def fits(self, size: SampleSize) -> bool:
        """Whether a sample fits a micro-batch of its own."""
        return bool(self.fitting(_table([size]))[0])

    def loads(self, samples: np.ndarray, tokens: np.ndarray, patches: np.ndarray) -> np.ndarray:
        """Micro-batches that so many samples fill at least; `tokens` with the padding of each alone."""
        full: np.ndarray = samples / self.rows if self.kind == "rows" else tokens / self.tokens
        if self.patches is None:
            return full
        return np.maximum(full, patches / self.patches)

    def load(self, samples: int, tokens: int, patches: int) -> float:
        """As `loads`, of one number of samples."""
        return float(self.loads(*np.array([[samples], [tokens], [patches]]))[0])

    def costs(self, sizes: np.ndarray, groups: Groups) -> np.ndarray:
        """What each of the micro-batches takes, in tokens of an endless number of short samples. All sums but the last
        are exact, so they depend on no order."""
        starts, (tokens, patches) = groups.starts[:-1], sizes[groups.members].T
        encoder = PATCH_TOKENS * np.add.reduceat(patches, starts)
        if self.kind == "packed":
            return encoder + np.add.reduceat(_cost_of_rows(1, tokens), starts)
        return encoder + _cost_of_rows(np.diff(groups.starts), self.padded(np.maximum.reduceat(tokens, starts)))

    def cost(self, sizes: Sequence[SampleSize]) -> float:
        """What a micro-batch takes: see `costs`."""
        return float(self.costs(_table(sizes), Groups.by_label(np.zeros(len(sizes), dtype=np.int64)))[0])

    def micro_batches(self, sizes: np.ndarray, overdue: int = 0) -> Groups:
        """Divide samples, the oldest first, into micro-batches.

        Args:
            sizes: (samples, 2) tokens and patches.
            overdue: So many, the oldest, share as few micro-batches as they can; the others fill these up.
        """
        if self.kind == "packed":
            return self._packed(sizes, overdue)
        return self._grouped(sizes, overdue)

    def _packed(self, sizes: np.ndarray, overdue: int) -> Groups:
        """By best fit. The oldest may have landed in what was filled last: then that is filled up from the others."""
        tokens, patches = sizes.T
        made = best_fit(tokens, self.tokens, patches, self.patches, overdue)
        starts = made.starts[:-1]
        of_packs = [np.add.reduceat(each[made.members], starts) for each in (tokens, patches)]
        fills = self.loads(np.diff(made.starts), *of_packs)
        if len(made) == 1 or fills[0] > fills.min():
            return made
        # The first pack holds the oldest sample, so it is used next, however empty. The longest go into it first: they
        # leave room elsewhere for what is drawn later.
        labels, room, spare = made.labels(), self.tokens - of_packs[0][0], (self.patches or 0) - of_packs[1][0]
        others = np.flatnonzero(labels > 0)
        others = others[np.argsort(-tokens[others], kind="stable")]
        while True:
            fits = tokens[others] <= room
            if self.patches is not None:
                fits &= patches[others] <= spare
            place = int(fits.argmax()) if len(fits) else 0
            if not fits[place : place + 1].any():
                return Groups.by_label(labels)
            taken = others[place]
            labels[taken], room, spare = 0, room - tokens[taken], spare - patches[taken]
            others = others[place + 1 :]

    def _grouped(self, sizes: np.ndarray, overdue: int) -> Groups:
        """Neighbours by length. What does not fill a group remains at the end that the oldest is not at."""
        order = np.argsort(-sizes[:, 0], kind="stable")
        if overdue:
            # The longest of them come first and the shortest of the others follow their shortest: neighbours in length.
            return self._cut(sizes, np.concatenate([order[order < overdue], order[order >= overdue][::-1]]))
        groups = self._cut(sizes, order)
        # Cut from the longest on, the last group is the one that is not full; from the shortest on, the other end is.
        if len(groups) > 1 and 0 in groups.only([len(groups) - 1]).members:
            groups = self._cut(sizes, order[::-1])
        return groups

    def _cut(self, sizes: np.ndarray, order: np.ndarray) -> Groups:
        tokens, patches = self.padded(sizes[order, 0]).tolist(), sizes[order, 1].tolist()
        labels = []
        number, rows, longest, work = 0, 0, 0, 0
        for length, more in zip(tokens, patches, strict=True):
            rows, longest, work = rows + 1, max(longest, length), work + more
            if rows > 1 and not self._has_room(rows, longest, work):
                number, rows, longest, work = number + 1, 1, length, more
            labels.append(number)
        of_samples = np.empty(len(order), dtype=np.int64)
        of_samples[order] = labels
        return Groups.by_label(of_samples)

    def _has_room(self, rows: int, longest: int, patches: int) -> bool:
        is_within = rows <= self.rows if self.kind == "rows" else rows * longest <= self.tokens
        return is_within and (self.patches is None or patches <= self.patches)


def _table(sizes: Sequence[SampleSize]) -> np.ndarray:
    return np.array(sizes, dtype=np.int64).reshape(-1, 2)


def _cost_of_rows(rows: int | np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Of rows of so many tokens each."""
    cost: np.ndarray = rows * tokens * (1 + tokens / ATTENTION_TOKENS)
    return cost


class StepPlan(NamedTuple):
    """The micro-batches of a step."""

    batches: Groups
    """Of the samples that were buffered."""
    costs: np.ndarray
    """Of each micro-batch."""


def plan_step(shape: BatchShape, sizes: np.ndarray, overdue: int, count: int) -> StepPlan:
    """The step that a buffer gives: those of its micro-batches that cost about the same.

    Args:
        shape: What a micro-batch may hold.
        sizes: (samples, 2) tokens and patches, the oldest first.
        overdue: So many of them, the oldest, an epoch before left over.
        count: Micro-batches of a step.
    """
    made = shape.micro_batches(sizes, overdue)
    costs = shape.costs(sizes, made)
    # The oldest sample leaves the buffer with every step, and so do those that an epoch before left over. Indices of a
    # micro-batch are in order of age, so its first one says how old it is.
    firsts = made.firsts
    wanted = np.flatnonzero(firsts < max(1, overdue))
    wanted = wanted[np.argsort(firsts[wanted])][:count]
    chosen = nearest_in_cost(costs, wanted.tolist(), count)
    return StepPlan(made.only(chosen), costs[chosen])


def nearest_in_cost(costs: Sequence[float] | np.ndarray, wanted: Sequence[int], count: int) -> list[int]:
    """So many micro-batches, `wanted` (at most so many) among them, whose costs lie within the narrowest span; the
    costliest first."""
    # In the order of costs the narrowest span is a window of neighbours, so it is found by trying where it may start.
    of_all = np.asarray(costs, dtype=np.float64)
    order = np.argsort(-of_all, kind="stable")
    place_of = np.empty_like(order)
    place_of[order] = np.arange(len(order))
    places = sorted(place_of[list(wanted)].tolist())
    first, last = places[0], places[-1]
    if last - first >= count:  # they alone span more than a window: whatever lies between them makes it no wider
        between = sorted(set(range(first, last)).difference(places))
        found: list[int] = order[sorted(places + between[: count - len(places)])].tolist()
        return found
    sorted_costs = of_all[order]
    lowest, highest = max(0, last - count + 1), min(first, len(order) - count)
    spans = sorted_costs[lowest : highest + 1] - sorted_costs[lowest + count - 1 : highest + count]
    start = lowest + int(spans.argmin())
    window: list[int] = order[start : start + count].tolist()
    return window


def divided(parts: Sequence[Indices], count: int) -> list[Indices]:
    """So many micro-batches (lists or arrays), by halving the longest; empty ones where there are too few samples."""
    parts = list(parts)
    while len(parts) < count:
        longest = max(range(len(parts)), key=lambda i: len(parts[i]))
        if len(parts[longest]) <= 1:
            return parts + [parts[0][:0]] * (count - len(parts))
        half = (len(parts[longest]) + 1) // 2
        parts[longest : longest + 1] = [parts[longest][:half], parts[longest][half:]]
    return parts


def imbalance(costs: Sequence[float], ranks: int) -> float:
    """How much longer a step takes than if its cost were spread evenly: each turn of accumulation waits for its
    costliest micro-batch. 1.0 is even.

    Args:
        costs: Of the micro-batches of a step, by accumulation and then by rank.
        ranks: Ranks with different samples.
    """
    turns = np.asarray(costs, dtype=np.float64).reshape(-1, ranks)
    # The last number keeps a step whose micro-batches cost nothing from dividing by zero.
    return float(turns.max(axis=1).sum() / max(turns.mean(axis=1).sum(), 1e-12))


FEWEST_SAMPLES = 1024
"""Fewer are planned by the trainer itself, in some milliseconds."""
_MOST_BYTES = SLOT_BYTES // 2
"""Of the sizes that are asked about: the answer takes up to half as much again."""


class StepPlanner:
    """Answers with the plans of the buffers that it was given, in their order.

    Args:
        shape: What a micro-batch may hold.
        count: Micro-batches of a step.
        beside: Have a process plan where many samples wait; otherwise the trainer does it when it asks for the plan.
        timeout_s: Longest wait for a plan.
    """

    def __init__(self, shape: BatchShape, count: int, *, beside: bool, timeout_s: float) -> None:
        self._shape, self._count, self._beside, self._timeout_s = shape, count, beside, timeout_s
        self._process: _PlanningProcess | None = None
        self._under_way: deque[tuple[np.ndarray, int] | None] = deque()
        """Buffers that are planned here; None: one that the process has."""

    def begin(self, sizes: np.ndarray, overdue: int) -> None:
        """Begin with a buffer; only one at a time.

        Args:
            sizes: (samples, 2) tokens and patches, the oldest first.
            overdue: So many of them, the oldest, an epoch before left over.
        """
        if not self._beside or len(sizes) < FEWEST_SAMPLES or sizes.nbytes > _MOST_BYTES:
            self._under_way.append((sizes, overdue))
            return
        if self._process is None:
            self._process = _PlanningProcess(self._shape, self._count, self._timeout_s)
        self._process.begin(sizes, overdue)
        self._under_way.append(None)

    def wait(self) -> StepPlan:
        """The plan of the buffer that was begun with.

        Raises:
            DataError: The process died, or gives nothing for too long.
        """
        here = self._under_way.popleft()
        if here is not None:
            return plan_step(self._shape, here[0], here[1], self._count)
        assert self._process is not None
        return self._process.wait()

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.close()


class _Question(NamedTuple):
    """A buffer to plan a step of."""

    sizes: PackedBatch
    overdue: int


class _PlanningProcess:
    """Sizes and plans go through memory that both share, one buffer at a time; only notes are sent."""

    def __init__(self, shape: BatchShape, count: int, timeout_s: float) -> None:
        self._slots = SharedSlots(2)
        self._side = SideProcess(_Planning(shape, count, self._slots), timeout_s)
        self.close = self._side.close

    def begin(self, sizes: np.ndarray, overdue: int) -> None:
        note = self._slots.write(0, {"sizes": torch.from_numpy(sizes)})
        assert isinstance(note, PackedBatch)
        self._side.begin(_Question(note, overdue))

    def wait(self) -> StepPlan:
        plan = self._slots.read(self._side.wait())
        return StepPlan(Groups(plan["members"].numpy(), plan["starts"].numpy()), plan["costs"].numpy())


class _Planning(SideJob[_Question, PackedBatch]):
    """Reads sizes from slot 0, writes the plan into slot 1."""

    def __init__(self, shape: BatchShape, count: int, slots: SharedSlots) -> None:
        self._shape, self._count, self._slots = shape, count, slots

    @override
    def __call__(self, asked: _Question) -> PackedBatch:
        sizes = self._slots.read(asked.sizes)["sizes"].numpy()
        plan = plan_step(self._shape, sizes, asked.overdue, self._count)
        arrays = {"members": plan.batches.members, "starts": plan.batches.starts, "costs": plan.costs}
        note = self._slots.write(1, {name: torch.from_numpy(array) for name, array in arrays.items()})
        assert isinstance(note, PackedBatch)
        return note

    @override
    def doing(self, asked: _Question) -> str:
        return f"planning a step of {self._count} micro-batches"

    @override
    def stopped(self, asked: _Question, how: str) -> DataError:
        return DataError(
            f"the process that plans steps {how} at {self._count} micro-batches",
            key="data.dataloader_param.num_workers",
            way_out="One that is killed is mostly out of memory: lower num_workers or prefetch_factor; with "
            "num_workers: 0 the trainer plans by itself.",
        )
