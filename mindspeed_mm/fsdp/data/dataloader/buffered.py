"""The order for samples with lengths: packed rows, token budgets, or samples of similar length.

Samples are drawn into a buffer, in the order of their epoch; micro-batches are made of everything in it; those that
make a step leave it, the oldest sample always among them. What waits is part of the position, so a run that is resumed,
also with another number of ranks, goes on with the very next sample: nothing is lost and nothing comes twice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing, nullcontext
from functools import cached_property
from itertools import pairwise, starmap
from typing import Literal

import numpy as np
from typing_extensions import override

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.sample import TooLongError
from mindspeed_mm.fsdp.data.dataloader.order import (
    DataPosition,
    Deal,
    MicroBatch,
    Order,
    Planned,
    no_epochs,
    rows_as_they_stand,
    too_few,
)
from mindspeed_mm.fsdp.data.dataloader.planning import BatchShape, StepPlan, StepPlanner, divided, plan_step
from mindspeed_mm.fsdp.data.dataloader.sampler import EpochSampler, Pick, Picks
from mindspeed_mm.fsdp.data.dataloader.sizes import SizeBook

SHARE_ROWS = 32
"""Rows that a rank measures at a time."""
EXACT_ROWS = 2048
"""A data set of up to so many samples is measured and planned whole to count its steps."""
EXACT_KNOWN_ROWS = 50_000
"""One whose sizes are all known is only planned, which takes some seconds for so many samples."""
PROBE_ROWS = 512
"""Minimum number of samples that a larger data set is probed with."""
_FEWEST_STEPS = 4


class BufferedOrder(Order):
    """Steps over samples whose sizes are found out when they come near.

    Args:
        sampler: The samples of each epoch.
        sizes: Of every sample.
        shape: What a micro-batch may hold.
        deal: Micro-batches of a step.
        drop_last: Leave out what remains of an epoch when it no longer fills a step. It goes first in the next epoch:
            the same odd rows would be left out again and again. Otherwise the sequence runs on over the end, and what
            remains is filled up with rows of the next epoch.

    Raises:
        DataError: There are no samples.
    """

    def __init__(
        self, sampler: EpochSampler, sizes: SizeBook, shape: BatchShape, deal: Deal, *, drop_last: bool
    ) -> None:
        self._sampler, self._drop_last = sampler, drop_last
        self._at_end: _AtEnd = "run on"
        if drop_last:
            self._at_end = "drop"
        self.sizes: SizeBook = sizes
        self.shape: BatchShape = shape
        self._count, self._window = deal.micro_batches, SHARE_ROWS * deal.dp_size
        limits = {"patches": shape.patches, "rows": shape.rows or None, "tokens": shape.tokens}
        self.batching = {"kind": shape.kind, "micro_batches_per_step": self._count, **limits}
        if shape.kind != "rows":  # which hold so many rows, whatever their length
            self.most_tokens = shape.tokens
        if not sampler.draw(0, 0, 1):
            raise too_few(0, "not one to begin with")

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps that an epoch takes, or about as many: see `is_exact`."""
        if self._sampler.size is None:
            return None
        return self.steps_for(1)

    @property
    @override
    def epoch_share(self) -> float:
        if self._sampler.size is None:
            return 1.0
        return min(1.0, self._steps_of_an_epoch)

    @cached_property
    def is_exact(self) -> bool:  # type: ignore[override]
        """Whether `steps_for` counts; otherwise it goes by the beginning of the first epoch."""
        size = self._sampler.size
        if size is None:
            return False
        if self.sizes.knows(size):
            return size <= EXACT_KNOWN_ROWS
        return size <= EXACT_ROWS

    def steps_for(self, epochs: float) -> int:
        """Optimizer steps until so many epochs are done.

        Raises:
            ConfigError: The rows are a stream, which has no epochs.
        """
        if self._sampler.size is None:
            raise no_epochs()
        # Rounded first: 3 × 0.1 steps must not become one step more by the last bit.
        return math.ceil(round(epochs * self._steps_of_an_epoch, 6))

    def step(self, position: DataPosition) -> Planned:
        """The step at a position.

        Raises:
            DataError: No step can be made of a whole epoch.
        """
        buffer = self._filled(self._sampler, position, self._at_end)
        return _planned(buffer, plan_step(self.shape, buffer.sizes, buffer.overdue, self._count))

    @override
    def steps(self, position: DataPosition, *, ahead: bool = False) -> Generator[Planned, None, None]:
        """As `Order.steps`. Ahead, what they need is measured by a process of its own, and each is planned while the
        one before it is trained on."""
        yield from self._steps(self._sampler, position, self._at_end, ahead=ahead)

    @override
    def one_pass(self, *, ahead: bool = False) -> Generator[Planned, None, None]:
        """Every sample once, in the order of the rows. At the end micro-batches are divided until every rank has some,
        at worst blank ones."""
        rest = yield from self._steps(rows_as_they_stand(self._sampler), DataPosition(0, 0), "stop", ahead=ahead)
        yield from self._last(rest)

    def _steps(
        self, sampler: EpochSampler, position: DataPosition, at_end: _AtEnd, *, ahead: bool
    ) -> Generator[Planned, None, _Buffer]:
        """Steps, as long as a buffer fills one; the buffer that does not."""
        with self.sizes.ahead() if ahead else nullcontext(), closing(self._planner(ahead)) as planner:
            made: Planned | None = None
            buffer = self._filled(sampler, position, at_end)
            while buffer.load >= self._least(at_end):
                planner.begin(buffer.sizes, buffer.overdue)
                if made is not None:
                    yield made  # and the next one is under way
                planned = _planned(buffer, planner.wait())
                if ahead:
                    made = planned
                else:
                    yield planned
                buffer = self._filled(sampler, planned.after, at_end)
            if made is not None:
                yield made
        return buffer

    def _planner(self, beside: bool) -> StepPlanner:
        return StepPlanner(self.shape, self._count, beside=beside, timeout_s=self.sizes.timeout_s)

    @cached_property
    def _steps_of_an_epoch(self) -> float:
        size, position, steps, load = self._sampler.size or 0, DataPosition(0, 0), 0, 0.0
        while self.is_exact or steps < _FEWEST_STEPS or position.index < PROBE_ROWS:
            planned = self.step(position)
            if planned.after.epoch > 0:
                break
            position, steps, load = planned.after, steps + 1, load + self._load_of(planned)
        else:  # the epoch did not end: its beginning stands for all of it
            return steps * size / (position.index - len(position.pending))
        if self._drop_last:
            return float(max(1, steps))
        # The rest of the epoch takes the part of a step that it would fill as the steps before it were filled.
        rest = self._filled(self._sampler, position, "stop").load
        load_of_a_step: float = self._count
        if steps:
            load_of_a_step = load / steps
        return steps + rest / load_of_a_step

    def _load_of(self, planned: Planned) -> float:
        """Micro-batches that the samples of a step fill at least."""
        sizes = self.sizes.table(np.concatenate([Picks.of(batch.picks).rows for batch in planned.step]))
        tokens, patches = sizes[sizes[:, 0] >= 0].T
        return self.shape.load(len(tokens), int(self.shape.padded(tokens).sum()), int(patches.sum()))

    # --- the buffer --------------------------------------------------------------------------------------------------

    def _least(self, at_end: _AtEnd) -> int:
        """Micro-batches that a buffer must fill for a step. One that is hardly filled remains for later, if any."""
        if at_end == "drop":
            return self._count
        return self._count + 1

    def _filled(self, sampler: EpochSampler, position: DataPosition, at_end: _AtEnd) -> _Buffer:
        """What is pending, and as many more samples as a good choice takes; towards the end of an epoch fewer."""
        buffer, enough = _Buffer(self.shape, self.sizes, position), self.shape.lookahead(self._count)
        known = Picks.of(position.pending)
        if sampler.size is not None:  # there may be fewer rows than when the position was saved
            known = known[known.rows < sampler.size]
        buffer.add(known)
        buffer.carried, buffer.overdue = list(position.carried), min(position.overdue, len(buffer.picks))
        began = buffer.index
        while buffer.load < enough:
            drawn = sampler.draw(buffer.epoch, buffer.index, self._window)
            if drawn:
                buffer.index += buffer.add(drawn, enough)
                continue
            if at_end == "stop" or buffer.load >= self._least(at_end):
                break
            # A whole epoch was drawn and gives no step: the next one would give none either.
            if began == 0 and (at_end == "drop" or not buffer.picks):
                raise self._too_little(buffer)
            buffer.overdue = len(buffer.picks)  # they leave before the rows of the next epoch do
            if at_end == "drop":
                buffer.carried = buffer.picks.rows.tolist()
            buffer.epoch, buffer.index, began = buffer.epoch + 1, 0, 0
        if self.sizes.measures_ahead:
            self.sizes.expect(sampler.draw(buffer.epoch, buffer.index, 2 * self._window).rows)
        return buffer

    def _last(self, buffer: _Buffer) -> Iterator[Planned]:
        """The rest of a pass, in steps of which every rank has a part."""
        if not buffer.picks:
            raise self._too_little(buffer)
        made = self.shape.micro_batches(buffer.sizes)
        costs, parts_of_all = self.shape.costs(buffer.sizes, made), made.lists()
        by_cost = [parts_of_all[number] for number in np.argsort(-costs, kind="stable")]
        left_out = tuple(buffer.left_out)
        for start in range(0, len(made), self._count):
            parts = divided(by_cost[start : start + self._count], self._count)
            step: list[MicroBatch] = []
            for part in parts:
                if part:
                    step.append(MicroBatch(buffer.picks[np.array(part)]))
                else:  # a rank for which nothing is left gets the oldest sample as a blank row
                    step.append(MicroBatch(buffer.picks[:1], blank_rows=1))
            yield Planned(step, DataPosition(1, 0), left_out)
            left_out = ()

    def _too_little(self, buffer: _Buffer) -> DataError:
        bad, first = len(buffer.left_out), ""
        if bad:
            first = f"; the first: {buffer.left_out[0][1]}"
        if not buffer.picks and bad:
            return DataError(f"{bad} samples cannot be used, and none remains{first}")
        of_size = ""
        if self.shape.kind != "rows":
            of_size = f" of {self.shape.tokens:,} tokens"
        why = f"which do not fill the {self._count} micro-batches{of_size} of a step"
        if bad:
            why += f", and {bad} of them cannot be used{first}"
        return too_few(self._sampler.size or 0, why)


_AtEnd = Literal["drop", "run on", "stop"]
"""What becomes of the rest of an epoch."""


class _Buffer:
    """Samples that are drawn and not taken yet, the oldest first."""

    def __init__(self, shape: BatchShape, book: SizeBook, position: DataPosition) -> None:
        self.epoch, self.index = position.epoch, position.index
        self.left_out: list[tuple[Pick, DataError]] = []
        self.carried: list[int] = []
        """Rows to be passed over once: what the epoch before left over is here already."""
        self.overdue = 0
        """How many of them, the oldest, an epoch before left over."""
        self._shape, self._book = shape, book
        self.picks = Picks.of(())
        self.sizes = np.empty((0, 2), dtype=np.int64)
        """(samples, 2) tokens and patches."""
        self._tokens = self._patches = 0

    @property
    def load(self) -> float:
        """Micro-batches that it fills at least."""
        return self._shape.load(len(self.picks), self._tokens, self._patches)

    def add(self, picks: Picks, enough: float = math.inf) -> int:
        """Take in samples until there is enough; how many were looked at.

        Raises:
            DataError: The process that measures died or hangs.
        """
        sizes = self._book.table(picks.rows)
        passed_over = self._passed_over(picks.rows)
        is_usable = (sizes[:, 0] >= 0) & self._shape.fitting(sizes)
        taken, looked_at = np.flatnonzero(is_usable & ~passed_over), len(picks)
        if enough < math.inf:
            samples = len(self.picks) + 1 + np.arange(len(taken))
            tokens = self._tokens + np.cumsum(self._shape.padded(sizes[taken, 0]))
            patches = self._patches + np.cumsum(sizes[taken, 1])
            last = int(np.searchsorted(self._shape.loads(samples, tokens, patches), enough))
            if last < len(taken):  # the one with which there is enough
                taken, looked_at = taken[: last + 1], int(taken[last]) + 1
        # Mostly all of them are taken, which needs no copy.
        places: np.ndarray | slice = slice(looked_at)
        if len(taken) < looked_at:
            places = taken
        self._put(picks[places], sizes[places])
        for place in np.flatnonzero(~is_usable[:looked_at] & ~passed_over[:looked_at]).tolist():
            self.left_out.append((picks[place], self._fault(picks[place].row, sizes[place])))
        self._strike_out(picks.rows[:looked_at][passed_over[:looked_at]])
        return looked_at

    def _put(self, picks: Picks, sizes: np.ndarray) -> None:
        self.picks = self.picks + picks if self.picks else picks
        self.sizes = np.concatenate([self.sizes, sizes]) if len(self.sizes) else sizes
        self._tokens += int(self._shape.padded(sizes[:, 0]).sum())
        self._patches += int(sizes[:, 1].sum())

    def _passed_over(self, rows: np.ndarray) -> np.ndarray:
        """(rows,) whether each is here already: a row as often as it was carried over."""
        passed_over = np.zeros(len(rows), dtype=bool)
        if not self.carried:
            return passed_over
        left = Counter(self.carried)
        for place in np.flatnonzero(np.isin(rows, self.carried)).tolist():
            row = int(rows[place])
            if left[row]:
                left[row] -= 1
                passed_over[place] = True
        return passed_over

    def _strike_out(self, rows: np.ndarray) -> None:
        """Their turn was passed over."""
        if not len(rows):
            return
        struck, kept = Counter(rows.tolist()), []
        for row in self.carried:
            if struck[row]:
                struck[row] -= 1
            else:
                kept.append(row)
        self.carried = kept

    def _fault(self, row: int, size: np.ndarray) -> DataError:
        """Why a sample cannot be used: it alone may exceed a micro-batch."""
        tokens, patches = size.tolist()
        if tokens < 0:
            return self._book.error(row)
        most_patches = "any number"
        if self._shape.patches is not None:
            most_patches = str(self._shape.patches)
        return TooLongError(
            f"the sample has {tokens} tokens and {patches} patches, and a micro-batch may hold "
            f"{self._shape.tokens} and {most_patches}",
            key="data.dataloader_param.max_tokens_per_batch",
            way_out="Raise it, or max_patches_per_batch; or make the samples smaller.",
        )


def _planned(buffer: _Buffer, plan: StepPlan) -> Planned:
    """The step of a buffer, and what waits."""
    taken, parts = buffer.picks[plan.batches.members], list(starmap(slice, pairwise(plan.batches.starts.tolist())))
    picks = map(Picks, map(taken.epochs.__getitem__, parts), map(taken.rows.__getitem__, parts))
    step = [MicroBatch(each, 0, cost) for each, cost in zip(picks, plan.costs.tolist(), strict=True)]
    waits = np.ones(len(buffer.picks), dtype=bool)
    waits[plan.batches.members] = False
    overdue = int(waits[: buffer.overdue].sum())
    after = DataPosition(buffer.epoch, buffer.index, buffer.picks[waits], tuple(buffer.carried), overdue)
    return Planned(step, after, tuple(buffer.left_out))
