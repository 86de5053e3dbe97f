"""Micro-batches and steps: an order gives the micro-batches of one optimizer step after the other, a deal says which
rank takes which.

A position in the data is (epoch, samples consumed): it knows nothing of ranks or workers, so it survives a change of
both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.dataloader.sampler import Sampler

Part = TypeVar("Part")


@dataclass(frozen=True)
class DataPosition:
    """How far into the data a run is."""

    epoch: int
    index: int
    """Samples of this epoch's order that are consumed, over all ranks."""

    def to_dict(self) -> dict[str, int]:
        """For a checkpoint."""
        return {"epoch": self.epoch, "index": self.index}

    @classmethod
    def from_dict(cls, state: dict[str, int]) -> DataPosition:
        """Back from a checkpoint."""
        return cls(int(state["epoch"]), int(state["index"]))


class Pick(NamedTuple):
    """One sample to take."""

    epoch: int
    row: int
    """Index into the data set."""


class MicroBatch(NamedTuple):
    """Samples that are computed at once."""

    picks: tuple[Pick, ...]
    blank_rows: int = 0
    """Rows at the end that only fill up: they count for nothing."""


Step = list[MicroBatch]
"""The micro-batches of one optimizer step over all ranks: by accumulation, then by rank."""


class Order(Protocol):
    """The endless sequence of steps."""

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch."""

    @property
    def batching(self) -> dict[str, Any]:
        """What else than the samples decides how they are put together: the same before and after a resume."""

    def step(self, position: DataPosition) -> tuple[Step, DataPosition]:
        """The step at a position, and the position after it."""

    def steps_for(self, epochs: float) -> int:
        """Optimizer steps until so many epochs are done."""

    def one_pass(self) -> list[Step]:
        """Every sample once, in the order of the rows; steps are filled up with blank rows."""


@dataclass(frozen=True)
class Deal:
    """How the micro-batches of an optimizer step are split over ranks."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    dp_rank: int
    dp_size: int

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step, over all ranks."""
        return self.gradient_accumulation_steps * self.dp_size

    @property
    def global_batch(self) -> int:
        """Samples of a step, over all ranks, where micro-batches are full."""
        return self.micro_batch_size * self.micro_batches

    def mine(self, step: Sequence[Part]) -> list[Part]:
        """This rank's micro-batches. Those of all ranks, by accumulation and then by rank, make up the step."""
        return list(step[self.dp_rank :: self.dp_size])


class GlobalOrder:
    """The endless sequence of samples, cut into micro-batches and steps.

    Args:
        sampler: The order of an epoch.
        deal: Sizes of micro-batch and step.
        drop_last: Leave out what remains of an epoch when it is less than a step. Otherwise the sequence runs on over
            the end of an epoch, so that nothing is left out and nothing comes twice.

    Raises:
        DataError: No step fits into an epoch.
    """

    def __init__(self, sampler: Sampler, deal: Deal, drop_last: bool) -> None:
        self._sampler, self._drop_last = sampler, drop_last
        self._micro_batch_size, self._global_batch = deal.micro_batch_size, deal.global_batch
        if sampler.size == 0 or (drop_last and sampler.size < self._global_batch):
            raise too_few(sampler.size, f"fewer than one global batch of {self._global_batch}")

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every sample was taken (with `drop_last`, until no whole step is left)."""
        size = self._sampler.size
        return size // self._global_batch if self._drop_last else -(-size // self._global_batch)

    @property
    def batching(self) -> dict[str, Any]:
        """Nothing: any split of the sequence gives the same steps."""
        return {}

    def steps_for(self, epochs: float) -> int:
        """Optimizer steps until so many epochs are done; without `drop_last` their ends run on into each other."""
        if self._drop_last:
            return math.ceil(epochs * self.steps_per_epoch)
        return math.ceil(epochs * self._sampler.size / self._global_batch)

    def step(self, position: DataPosition) -> tuple[Step, DataPosition]:
        """The step at a position, and the position after it."""
        epoch, index = position.epoch, position.index
        if self._drop_last and self._sampler.size - index < self._global_batch:
            epoch, index = epoch + 1, 0
        picks: list[Pick] = []
        while len(picks) < self._global_batch:
            if index >= self._sampler.size:  # beyond it when a run goes on with fewer data than before
                epoch, index = epoch + 1, 0
            taken = self._sampler.order(epoch)[index : index + self._global_batch - len(picks)]
            picks += [Pick(epoch, i) for i in taken.tolist()]
            index += len(taken)
        return self._cut(picks), DataPosition(epoch, index)

    def one_pass(self) -> list[Step]:
        """Every sample once, in the order of the rows. What the last step lacks is filled up with blank rows."""
        size, whole = self._sampler.size, self._global_batch
        starts = range(0, size, whole)
        return [self._cut([Pick(0, i) for i in range(s, min(s + whole, size))], Pick(0, size - 1)) for s in starts]

    def _cut(self, picks: list[Pick], filler: Pick | None = None) -> Step:
        cut = []
        for start in range(0, self._global_batch, self._micro_batch_size):
            part = picks[start : start + self._micro_batch_size]
            missing = self._micro_batch_size - len(part)
            cut.append(MicroBatch((*part, *[filler or picks[-1]] * missing), missing))
        return cut


def too_few(size: int, why: str) -> DataError:
    """The error of a data set without a single step."""
    return DataError(
        f"the data set has {size} samples, {why}",
        key="data.dataloader_param.drop_last",
        way_out="Set drop_last: false, lower the batch size, or give more data.",
    )


def steps_from(order: Order, position: DataPosition) -> Iterator[Step]:
    """Every step from a position on, without end."""
    while True:
        step, position = order.step(position)
        yield step
