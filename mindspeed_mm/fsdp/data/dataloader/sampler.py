"""The order of the samples, a pure function of (seed, epoch), and how a global batch is dealt to ranks.

A position in the data is (epoch, global index): it knows nothing of ranks or workers, so it survives a change of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.suggest import did_you_mean

_KEY = "data.dataloader_param.sampler_type"
_WORD = 2**64


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


class Sampler(Protocol):
    """The order of an epoch."""

    size: int

    def order(self, epoch: int) -> np.ndarray:
        """(size,) data set indices, every one once."""


class SequentialSampler:
    """The rows as they stand."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size = size

    def order(self, epoch: int) -> np.ndarray:
        """0, 1, 2 …"""
        return np.arange(self.size)


class BaseRandomBatchSampler:
    """A new random order every epoch."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self._seed = size, seed

    def order(self, epoch: int) -> np.ndarray:
        """The permutation of (seed, epoch)."""
        return permutation(self.size, self._seed, epoch)


def permutation(size: int, seed: int, stream: int) -> np.ndarray:
    """A permutation that no library version changes: the ranks of raw Philox words (Salmon et al., 2011)."""
    return _permutation(size, seed % _WORD, stream % _WORD)


@lru_cache(maxsize=2)
def _permutation(size: int, seed: int, stream: int) -> np.ndarray:
    words = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)).random_raw(size)
    order = np.argsort(words, kind="stable")
    order.setflags(write=False)
    return order


SAMPLERS = {"BaseRandomBatchSampler": BaseRandomBatchSampler, "SequentialSampler": SequentialSampler}
_PLANNED = ("LengthGroupedSampler", "BucketBatchSampler", "TokenBudgetSampler")


def build_sampler(dataloader_param: Any, size: int, seed: int) -> Sampler:
    """The sampler that the configuration names; `shuffle: false` and mode `base` keep the rows in order.

    Raises:
        ConfigError: Unknown, or not built yet.
    """
    name, mode = dataloader_param.sampler_type, dataloader_param.dataloader_mode
    if mode not in ("sampler", "base"):
        raise ConfigError(f"'{mode}' is not built yet", key="data.dataloader_param.dataloader_mode")
    if name in _PLANNED:
        raise ConfigError(f"{name} is not built yet", key=_KEY, way_out=f"Built: {', '.join(SAMPLERS)}.")
    if name not in SAMPLERS:
        raise ConfigError(
            f"'{name}' is no sampler", key=_KEY, way_out=f"{did_you_mean(name, SAMPLERS)}Built: {', '.join(SAMPLERS)}."
        )
    in_order = mode == "base" or not dataloader_param.shuffle
    return SequentialSampler(size) if in_order else SAMPLERS[name](size, seed)


@dataclass(frozen=True)
class Deal:
    """How the samples of an optimizer step are split: micro-batch after micro-batch, rank after rank."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    dp_rank: int
    dp_size: int

    @property
    def global_batch(self) -> int:
        """Samples of a step, over all ranks."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.dp_size

    def mine(self, picks: list[Any]) -> list[list[Any]]:
        """This rank's micro-batches. Those of all ranks, by accumulation and then by rank, make up `picks`."""
        size = self.micro_batch_size
        starts = ((a * self.dp_size + self.dp_rank) * size for a in range(self.gradient_accumulation_steps))
        return [picks[start : start + size] for start in starts]


class GlobalOrder:
    """The endless sequence of samples, cut into steps.

    Args:
        sampler: The order of an epoch.
        global_batch: Samples of a step.
        drop_last: Leave out what remains of an epoch when it is less than a step. Otherwise the sequence runs on over
            the end of an epoch, so that nothing is left out and nothing comes twice.

    Raises:
        DataError: No step fits into an epoch.
    """

    def __init__(self, sampler: Sampler, global_batch: int, drop_last: bool) -> None:
        self._sampler, self._global_batch, self._drop_last = sampler, global_batch, drop_last
        if sampler.size == 0 or (drop_last and sampler.size < global_batch):
            raise DataError(
                f"the data set has {sampler.size} samples, fewer than one global batch of {global_batch}",
                key="data.dataloader_param.drop_last",
                way_out="Set drop_last: false, lower the batch size, or give more data.",
            )

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every sample was taken (with `drop_last`, until no whole step is left)."""
        size = self._sampler.size
        return size // self._global_batch if self._drop_last else -(-size // self._global_batch)

    def step(self, position: DataPosition) -> tuple[list[Pick], DataPosition]:
        """The samples of the step at a position, and the position after it."""
        epoch, index = position.epoch, position.index
        if self._drop_last and self._sampler.size - index < self._global_batch:
            epoch, index = epoch + 1, 0
        picks: list[Pick] = []
        while len(picks) < self._global_batch:
            if index == self._sampler.size:
                epoch, index = epoch + 1, 0
            taken = self._sampler.order(epoch)[index : index + self._global_batch - len(picks)]
            picks += [Pick(epoch, i) for i in taken.tolist()]
            index += len(taken)
        return picks, DataPosition(epoch, index)

    def steps_from(self, position: DataPosition) -> Iterator[list[Pick]]:
        """The samples of every step from a position on, without end."""
        while True:
            picks, position = self.step(position)
            yield picks
