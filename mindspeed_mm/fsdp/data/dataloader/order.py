"""Micro-batches and steps: an order gives the micro-batches of one optimizer step after the other, a deal says which
rank takes which.

A position in the data is (epoch, samples drawn, those of them that wait in a buffer): it knows nothing of ranks or
workers, so it survives a change of both.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from typing_extensions import override

from mindspeed_mm.core.counts import is_count
from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.dataloader.planning import BatchShape
from mindspeed_mm.fsdp.data.dataloader.sampler import EpochSampler, Pick, SequentialSampler
from mindspeed_mm.fsdp.data.dataloader.sizes import SizeBook

Part = TypeVar("Part")


class RolloutPlace(NamedTuple):
    """How far a run is that trains on samples of its own."""

    number: int
    """The rollout that the last step was part of."""
    used: int
    """Steps that were taken of it."""
    digest: str
    """Of its file."""


@dataclass(frozen=True)
class DataPosition:
    """How far into the data a run is."""

    epoch: int
    index: int
    """Samples of this epoch's order that are drawn, over all ranks."""
    pending: Sequence[Pick] = ()
    """Samples drawn that wait for a step to fit into, the oldest first."""
    carried: tuple[int, ...] = ()
    """Rows that the epoch before left over: they go first in this epoch, and their own turn in it is still to be passed
    over."""
    overdue: int = 0
    """How many of those that wait, the oldest, an epoch before left over."""
    rollout: RolloutPlace | None = None
    """Where samples are answers to the drawn prompts: the position is the one behind the prompts of this rollout."""

    def to_dict(self) -> JsonObject:
        """Return the position as plain values for a checkpoint, which `from_dict` reads; empty fields are left out."""
        state: dict[str, Any] = {"epoch": self.epoch, "index": self.index}
        if self.pending:
            state["pending"] = list(map(list, self.pending))
        if self.carried:
            state["carried"] = list(self.carried)
        if self.overdue:
            state["overdue"] = self.overdue
        if self.rollout is not None:
            state["rollout"] = list(self.rollout)
        return state

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> DataPosition:
        """Back from a checkpoint. Raises `ValueError`, `TypeError` or `KeyError` for what is no position."""
        pending = tuple(Pick(epoch, row) for epoch, row in state.get("pending", ()))
        carried = tuple(state.get("carried", ()))
        rollout = RolloutPlace(*state["rollout"]) if "rollout" in state else None
        overdue = state.get("overdue", 0)
        counts = (state["epoch"], state["index"], *chain.from_iterable(pending), *carried, overdue)
        if not all(map(is_count, (*counts, *(rollout or ())[:2]))) or overdue > len(pending):
            raise ValueError("a count is negative, or is none")
        return cls(state["epoch"], state["index"], pending, carried, overdue, rollout)


class MicroBatch(NamedTuple):
    """Samples that are computed at once."""

    picks: Sequence[Pick]
    blank_rows: int = 0
    """As many as there are samples where there was none for a rank: they only fill up, and count for nothing."""
    cost: float = 0.0
    """What it takes relative to others; 0: not known."""


Step = list[MicroBatch]
"""The micro-batches of one optimizer step over all ranks: by accumulation, then by rank."""


class Planned(NamedTuple):
    """A step, and where the data stand after it."""

    step: Step
    after: DataPosition
    left_out: tuple[tuple[Pick, DataError], ...] = ()
    """Samples that were met on the way and cannot be used, and why."""


class Order(ABC):
    """The endless sequence of steps."""

    sizes: SizeBook | None = None
    """Sizes of samples, where they are found out as they come near."""
    shape: BatchShape | None = None
    """What a micro-batch may hold, where samples are put together by their sizes."""
    batching: dict[str, Any]
    """What else than the samples decides how they are put together: the same before and after a resume."""
    most_tokens: int | None = None
    """Maximum number of tokens in a micro-batch; None: no limit."""
    is_exact = True
    """Whether `steps_for` counts; otherwise it estimates."""

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of one epoch; None: rows are streamed, and their number is not known."""

    @property
    def epoch_share(self) -> float:
        """Steps of an epoch as a share where an epoch is less than a step, which rows of later epochs fill; else 1."""
        return 1.0

    @property
    def dropped(self) -> str:
        """What every epoch leaves out at its end (`drop_last`), with its number; empty where nothing, or not known."""
        return ""

    @abstractmethod
    def step(self, position: DataPosition) -> Planned:
        """The step at a position."""

    def steps(self, position: DataPosition, *, ahead: bool = False) -> Generator[Planned, None, None]:
        """Every step from a position on, without end.

        Args:
            position: Of the first.
            ahead: Processes beside this one may work ahead, until the generator is closed.
        """
        while True:
            planned = self.step(position)
            yield planned
            position = planned.after

    @abstractmethod
    def steps_for(self, epochs: float) -> int:
        """Optimizer steps until so many epochs are done."""

    @abstractmethod
    def one_pass(self, *, ahead: bool = False) -> Generator[Planned, None, None]:
        """Every sample once, in the order of the rows; a rank that gets none in the last step gets a blank row.

        Args:
            ahead: As for `steps`.
        """

    def go_on(
        self, position: DataPosition, before: Mapping[str, object] | None, *, may_skip: bool
    ) -> tuple[DataPosition, str]:
        """Where a resumed run goes on.

        Args:
            position: As saved.
            before: `batching` of the run that saved; None: as today's.
            may_skip: Go on with the next epoch where the place in the epoch cannot be kept.

        Returns:
            The position, and what to say of it; empty when nothing changes.

        Raises:
            CheckpointError: The place cannot be kept, and nothing may be skipped.
        """
        return position, ""


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


class GlobalOrder(Order):
    """The endless sequence of samples, cut into micro-batches and steps.

    Args:
        sampler: The samples of each epoch.
        deal: Sizes of micro-batch and step.
        drop_last: Leave out what remains of an epoch when it is less than a step. Otherwise the sequence runs on over
            the end of an epoch, so that nothing is left out and nothing comes twice.

    Raises:
        DataError: No step fits into an epoch.
    """

    def __init__(self, sampler: EpochSampler, deal: Deal, drop_last: bool) -> None:
        self._sampler, self._drop_last = sampler, drop_last
        self.batching = {}  # any split of the sequence gives the same steps
        self._micro_batch_size, self._global_batch = deal.micro_batch_size, deal.global_batch
        first = len(sampler.draw(0, 0, self._global_batch))
        if first == 0 or (drop_last and first < self._global_batch):
            raise too_few(first, f"fewer than one global batch of {self._global_batch}")

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps until every sample was taken (with `drop_last`, until no whole step is left)."""
        size = self._sampler.size
        if size is None:
            return None
        if self._drop_last:
            return size // self._global_batch
        return -(-size // self._global_batch)

    @property
    @override
    def epoch_share(self) -> float:
        if self._sampler.size is None:
            return 1.0
        return min(1.0, self._sampler.size / self._global_batch)

    @property
    @override
    def dropped(self) -> str:
        rest = (self._sampler.size or 0) % self._global_batch
        if self._drop_last and rest:
            return f"{rest:,} {'sample' if rest == 1 else 'samples'}"
        return ""

    def steps_for(self, epochs: float) -> int:
        """Optimizer steps until so many epochs are done; without `drop_last` their ends run on into each other.

        Raises:
            ConfigError: The rows are a stream, which has no epochs.
        """
        if self._sampler.size is None:
            raise no_epochs()
        if self._drop_last:
            return math.ceil(epochs * (self._sampler.size // self._global_batch))
        return math.ceil(epochs * self._sampler.size / self._global_batch)

    def step(self, position: DataPosition) -> Planned:
        """The step at a position."""
        epoch, index, whole = position.epoch, position.index, self._global_batch
        picks = self._sampler.draw(epoch, index, whole)
        index += len(picks)
        if self._drop_last and len(picks) < whole:
            picks = picks[:0]
        while len(picks) < whole:
            drawn = self._sampler.draw(epoch + 1, 0, whole - len(picks))
            epoch, index, picks = epoch + 1, len(drawn), picks + drawn
        return Planned(self._cut(picks), DataPosition(epoch, index))

    @override
    def one_pass(self, *, ahead: bool = False) -> Generator[Planned, None, None]:
        """Every sample once, in the order of the rows. Ranks for which the last step has no sample get a blank row."""
        in_order, index = rows_as_they_stand(self._sampler), 0
        while picks := in_order.draw(0, index, self._global_batch):
            index += len(picks)
            yield Planned(self._cut(picks), DataPosition(0, index))

    def _cut(self, picks: Sequence[Pick]) -> Step:
        cut = []
        for start in range(0, self._global_batch, self._micro_batch_size):
            part = picks[start : start + self._micro_batch_size]
            cut.append(MicroBatch(part) if part else MicroBatch((picks[-1],), blank_rows=1))
        return cut


def rows_as_they_stand(sampler: EpochSampler) -> EpochSampler:
    """For a pass: every row once. Rows that are streamed come as they are found."""
    if sampler.size is None:
        return sampler
    return SequentialSampler(sampler.size)


TOO_FEW = "data.dataloader_param.drop_last"
"""Key of the error of a data set without a single step."""


def too_few(size: int, why: str) -> DataError:
    """The error of a data set without a single step."""
    return DataError(
        f"the data set has {size} samples, {why}",
        key=TOO_FEW,
        way_out="Set drop_last: false, lower the batch size, or give more data.",
    )


def no_epochs() -> ConfigError:
    """The error of epochs over rows whose number is not known."""
    return ConfigError(
        "the number of streamed rows is not known until all are read, so epochs cannot be counted in steps",
        key="training.train_iters",
        way_out="Set it to a number of steps.",
    )
