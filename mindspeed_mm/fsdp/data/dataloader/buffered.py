"""The order for samples with lengths: packed rows, token budgets, or samples of similar length.

Samples are drawn into a buffer, in the order of their epoch; micro-batches are made of everything in it; those that
make a step leave it, the oldest sample always among them. What waits is part of the position, so a run that is resumed,
also with another number of ranks, goes on with the very next sample: nothing is lost and nothing comes twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import compress
from typing import Literal

from typing_extensions import override

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.sample import SampleSize, TooLongError
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
from mindspeed_mm.fsdp.data.dataloader.planning import BatchShape, divided, nearest_in_cost
from mindspeed_mm.fsdp.data.dataloader.sampler import EpochSampler, Pick
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
        self.sizes: SizeBook = sizes
        self.shape: BatchShape = shape
        self._count, self._window = deal.micro_batches, SHARE_ROWS * deal.dp_size
        limits = {"patches": shape.patches, "rows": shape.rows or None, "tokens": shape.tokens}
        self.batching = {"kind": shape.kind, "micro_batches_per_step": self._count, **limits}
        self.most_tokens = None if shape.kind == "rows" else shape.tokens
        if not sampler.draw(0, 0, 1):
            raise too_few(0, "not one to begin with")

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps that an epoch takes, or about as many: see `is_exact`."""
        return None if self._sampler.size is None else self.steps_for(1)

    @property
    @override
    def epoch_share(self) -> float:
        return 1.0 if self._sampler.size is None else min(1.0, self._steps_of_an_epoch)

    @cached_property
    def is_exact(self) -> bool:  # type: ignore[override]
        """Whether `steps_for` counts; otherwise it goes by the beginning of the first epoch."""
        size = self._sampler.size
        if size is None:
            return False
        return size <= (EXACT_KNOWN_ROWS if self.sizes.knows(size) else EXACT_ROWS)

    def steps_for(self, epochs: float) -> int:
        """Optimizer steps until so many epochs are done.

        Raises:
            ConfigError: The rows are a stream, which has no epochs.
        """
        if self._sampler.size is None:
            raise no_epochs()
        return math.ceil(round(epochs * self._steps_of_an_epoch, 6))

    def step(self, position: DataPosition) -> Planned:
        """The step at a position.

        Raises:
            DataError: No step can be made of a whole epoch.
        """
        buffer = self._filled(self._sampler, position, "drop" if self._drop_last else "run on")
        planned = self._planned(buffer)
        self.sizes.expect([pick.row for pick in self._sampler.draw(buffer.epoch, buffer.index, 2 * self._window)])
        return planned

    def one_pass(self) -> Iterator[Planned]:
        """Every sample once, in the order of the rows. At the end micro-batches are divided until every rank has some,
        at worst blank ones."""
        in_order, position = rows_as_they_stand(self._sampler), DataPosition(0, 0)
        while (buffer := self._filled(in_order, position, "stop")).load >= self._least("stop"):
            planned = self._planned(buffer)
            yield planned
            position = planned.after
        yield from self._last(buffer)

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
        load_of_a_step = load / steps if steps else self._count
        return steps + rest / load_of_a_step

    def _load_of(self, planned: Planned) -> float:
        """Micro-batches that the samples of a step fill at least."""
        samples = tokens = patches = 0
        for batch in planned.step:
            for size in self.sizes.of([pick.row for pick in batch.picks]):
                if not isinstance(size, DataError):
                    samples += 1
                    tokens += self.shape.padded(size.tokens)
                    patches += size.patches
        return self.shape.load(samples, tokens, patches)

    # --- the buffer --------------------------------------------------------------------------------------------------

    def _least(self, at_end: _AtEnd) -> int:
        """Micro-batches that a buffer must fill for a step. One that is hardly filled remains for later, if any."""
        return self._count if at_end == "drop" else self._count + 1

    def _filled(self, sampler: EpochSampler, position: DataPosition, at_end: _AtEnd) -> _Buffer:
        """What is pending, and as many more samples as a good choice takes; towards the end of an epoch fewer."""
        buffer, enough = _Buffer(self.shape, position), self.shape.lookahead(self._count)
        known = list(position.pending)
        if sampler.size is not None:  # there may be fewer rows than when the position was saved
            known = [pick for pick in known if pick.row < sampler.size]
        buffer.add(known, self._usable(known))
        buffer.carried, buffer.overdue = list(position.carried), min(position.overdue, len(buffer.picks))
        began = buffer.index
        while buffer.load < enough:
            drawn = sampler.draw(buffer.epoch, buffer.index, self._window)
            if drawn:
                buffer.index += buffer.add(drawn, self._usable(drawn), enough)
                continue
            if at_end == "stop" or buffer.load >= self._least(at_end):
                break
            if began == 0 and (at_end == "drop" or not buffer.picks):
                raise self._too_little(buffer)
            buffer.overdue = len(buffer.picks)  # they leave before the rows of the next epoch do
            if at_end == "drop":
                buffer.carried = [pick.row for pick in buffer.picks]
            buffer.epoch, buffer.index, began = buffer.epoch + 1, 0, 0
        return buffer

    def _usable(self, picks: Sequence[Pick]) -> list[SampleSize | DataError]:
        """Sizes, or why a sample cannot be used: it alone may exceed a micro-batch."""
        found = self.sizes.of([pick.row for pick in picks])
        for i, size in enumerate(found):
            if isinstance(size, SampleSize) and not self.shape.fits(size):
                found[i] = self._too_large(size)
        return found

    def _cost(self, buffer: _Buffer, batch: Sequence[int]) -> float:
        return self.shape.cost([buffer.sizes[i] for i in batch])

    def _planned(self, buffer: _Buffer) -> Planned:
        """The step that the buffer gives: those of its micro-batches that cost about the same, and what waits."""
        made = self.shape.micro_batches(buffer.sizes, buffer.overdue)
        costs = [self._cost(buffer, batch) for batch in made]
        # The oldest sample leaves the buffer with every step, and so do those that an epoch before left over. Indices
        # of a micro-batch are in order of age, so its first one says how old it is.
        due = max(1, buffer.overdue)
        wanted = [number for number, batch in enumerate(made) if batch[0] < due]
        wanted.sort(key=lambda number: made[number][0])
        chosen = nearest_in_cost(costs, wanted[: self._count], self._count)
        step: list[MicroBatch] = []
        waits = [True] * len(buffer.picks)
        for number in chosen:
            step.append(MicroBatch(buffer.picks_at(made[number]), cost=costs[number]))
            for i in made[number]:
                waits[i] = False
        waiting = tuple(compress(buffer.picks, waits))
        overdue = sum(waits[: buffer.overdue])
        after = DataPosition(buffer.epoch, buffer.index, waiting, tuple(buffer.carried), overdue)
        return Planned(step, after, tuple(buffer.left_out))

    def _last(self, buffer: _Buffer) -> Iterator[Planned]:
        """The rest of a pass, in steps of which every rank has a part."""
        if not buffer.picks:
            raise self._too_little(buffer)
        made = self.shape.micro_batches(buffer.sizes)
        made.sort(key=lambda batch: -self._cost(buffer, batch))
        left_out = tuple(buffer.left_out)
        for start in range(0, len(made), self._count):
            parts = divided(made[start : start + self._count], self._count)
            step: list[MicroBatch] = []
            for part in parts:
                if part:
                    step.append(MicroBatch(buffer.picks_at(part)))
                else:  # a rank for which nothing is left gets the oldest sample as a blank row
                    step.append(MicroBatch(buffer.picks_at([0]), blank_rows=1))
            yield Planned(step, DataPosition(1, 0), left_out)
            left_out = ()

    def _too_large(self, size: SampleSize) -> TooLongError:
        most_patches = "any number" if self.shape.patches is None else str(self.shape.patches)
        return TooLongError(
            f"the sample has {size.tokens} tokens and {size.patches} patches, and a micro-batch may hold "
            f"{self.shape.tokens} and {most_patches}",
            key="data.dataloader_param.max_tokens_per_batch",
            way_out="Raise it, or max_patches_per_batch; or make the samples smaller.",
        )

    def _too_little(self, buffer: _Buffer) -> DataError:
        if buffer.left_out:
            first = buffer.left_out[0][1]
            return DataError(f"{len(buffer.left_out)} samples cannot be used, and too few remain; the first: {first}")
        of_size = "" if self.shape.kind == "rows" else f" of {self.shape.tokens:,} tokens"
        return too_few(self._sampler.size or 0, f"which do not fill the {self._count} micro-batches{of_size} of a step")


_AtEnd = Literal["drop", "run on", "stop"]
"""What becomes of the rest of an epoch."""


class _Buffer:
    """Samples that are drawn and not taken yet, the oldest first."""

    def __init__(self, shape: BatchShape, position: DataPosition) -> None:
        self.epoch, self.index = position.epoch, position.index
        self.left_out: list[tuple[Pick, DataError]] = []
        self.carried: list[int] = []
        """Rows to be passed over once: what the epoch before left over is here already."""
        self.overdue = 0
        """How many of them, the oldest, an epoch before left over."""
        self._shape = shape
        self.picks: list[Pick] = []
        self.sizes: list[SampleSize] = []
        self._tokens = self._patches = 0

    @property
    def load(self) -> float:
        """Micro-batches that it fills at least."""
        return self._shape.load(len(self.picks), self._tokens, self._patches)

    def picks_at(self, places: Sequence[int]) -> tuple[Pick, ...]:
        """The samples at these places."""
        return tuple(self.picks[i] for i in places)

    def add(self, picks: Sequence[Pick], sizes: Sequence[SampleSize | DataError], enough: float = math.inf) -> int:
        """Take in samples until there is enough; how many were looked at."""
        for looked_at, (pick, size) in enumerate(zip(picks, sizes, strict=True), 1):
            if pick.row in self.carried:
                self.carried.remove(pick.row)
                continue
            if isinstance(size, DataError):
                self.left_out.append((pick, size))
                continue
            self.picks.append(pick)
            self.sizes.append(size)
            self._tokens += self._shape.padded(size.tokens)
            self._patches += size.patches
            if self.load >= enough:
                return looked_at
        return len(picks)
