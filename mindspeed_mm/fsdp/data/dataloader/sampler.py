"""The order of the samples of an epoch, a function of (seed, epoch). `mixing.py` has another.

Rows that are streamed are numbered as they stand in the files. Every rank finds them for itself, which reads the files
but parses nothing; a row is parsed only where it is trained on or measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, overload

import numpy as np
from typing_extensions import override

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.core.suggest import did_you_mean

SAMPLER_KEY = "data.dataloader_param.sampler_type"
_WORD = 2**64


class Pick(NamedTuple):
    """One sample to take from the data set, and the epoch that it belongs to."""

    epoch: int
    row: int
    """Index into the data set."""


class Picks(Sequence[Pick]):
    """Samples to take, in order: equal to any sequence of the same picks, and held as arrays, since at thousands of
    ranks a step looks at many.

    Args:
        epochs: (picks,) int64 of each.
        rows: (picks,) int64 of each.
    """

    __slots__ = ("epochs", "rows")

    def __init__(self, epochs: np.ndarray, rows: np.ndarray) -> None:
        self.epochs, self.rows = epochs, rows

    @classmethod
    def of(cls, picks: Sequence[Pick]) -> Picks:
        """The same picks as arrays."""
        if isinstance(picks, Picks):
            return picks
        numbers = np.array(picks, dtype=np.int64).reshape(-1, 2)
        return cls(numbers[:, 0], numbers[:, 1])

    @classmethod
    def in_epoch(cls, epoch: int, rows: np.ndarray) -> Picks:
        """These rows, all of them in one epoch."""
        return cls(np.full(len(rows), epoch), rows)

    @override
    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, place: int) -> Pick: ...

    @overload
    def __getitem__(self, place: slice | np.ndarray) -> Picks: ...

    @override
    def __getitem__(self, place: int | slice | np.ndarray) -> Pick | Picks:
        if isinstance(place, (slice, np.ndarray)):
            return Picks(self.epochs[place], self.rows[place])
        return Pick(int(self.epochs[place]), int(self.rows[place]))

    @override
    def __iter__(self) -> Iterator[Pick]:
        return map(Pick, self.epochs.tolist(), self.rows.tolist())

    def __add__(self, others: Sequence[Pick]) -> Picks:
        added = Picks.of(others)
        return Picks(np.concatenate([self.epochs, added.epochs]), np.concatenate([self.rows, added.rows]))

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        if isinstance(other, Picks):
            return np.array_equal(self.epochs, other.epochs) and np.array_equal(self.rows, other.rows)
        return tuple(self) == tuple(other)

    @override
    def __hash__(self) -> int:
        return hash(tuple(self))

    @override
    def __repr__(self) -> str:
        return repr(tuple(self))


class EpochSampler(Protocol):
    """The sequence of the samples of each epoch."""

    @property
    def size(self) -> int | None:
        """Samples of an epoch; None: found out at its end."""

    def draw(self, epoch: int, index: int, count: int) -> Picks:
        """So many samples of an epoch's sequence from `index` on; fewer, at last none, where the epoch ends."""


class SequentialSampler:
    """The rows as they stand."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size = size

    def order(self, epoch: int) -> np.ndarray:
        """(size,) 0, 1, 2 …"""
        return np.arange(self.size)

    def draw(self, epoch: int, index: int, count: int) -> Picks:
        """Rows `index` and those after it."""
        return Picks.in_epoch(epoch, np.arange(index, max(index, min(index + count, self.size))))


class BaseRandomBatchSampler:
    """A new random order every epoch."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self._seed = size, seed

    def order(self, epoch: int) -> np.ndarray:
        """(size,) the permutation of (seed, epoch)."""
        return permutation(self.size, self._seed, epoch)

    def draw(self, epoch: int, index: int, count: int) -> Picks:
        """A part of the permutation."""
        return Picks.in_epoch(epoch, self.order(epoch)[index : index + count])


class StreamSampler:
    """Rows in windows of equal size, each shuffled by (seed, epoch, window).

    Args:
        has: Whether a row of this number exists; reads on until it is found or the files end.
        window: Rows of a window; 1 keeps their order.
        seed: Of the order.
    """

    size: int | None = None

    def __init__(self, has: Callable[[int], bool], window: int, seed: int) -> None:
        self._has, self._window, self._seed = has, window, seed

    def draw(self, epoch: int, index: int, count: int) -> Picks:
        """So many rows from the n-th of an epoch on; fewer where the files end."""
        drawn = [np.empty(0, dtype=np.int64)]
        end = index + count
        while index < end:
            number, place = divmod(index, self._window)
            rows = self._rows_of_window(number)
            if place >= rows:
                break
            order = permutation(rows, derive_seed(self._seed, "window", number), epoch)
            drawn.append(number * self._window + order[place : place + end - index])
            index += len(drawn[-1])
        return Picks.in_epoch(epoch, np.concatenate(drawn))

    def _rows_of_window(self, number: int) -> int:
        first = number * self._window
        if self._has(first + self._window - 1):
            return self._window
        return bisect_left(range(self._window), True, key=lambda place: not self._has(first + place))


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
"""Names of orders in which rows are drawn."""
BUCKET_SAMPLERS = frozenset({"BucketBatchSampler", "VariableVideoBatchSampler", "LengthGroupedSampler"})
"""Names of one mechanism: that of `buckets.py` for generators, whose samples share a few sizes; for samples with
lengths micro-batches of similar length (`buffered.py`)."""
BUDGET_SAMPLER = "TokenBudgetSampler"


def build_sampler(dataloader_param: Any, size: int, seed: int) -> EpochSampler:
    """The order in which rows are drawn: `shuffle: false`, mode `base` and SequentialSampler keep them as they stand;
    the names that say how micro-batches are formed draw at random."""
    name = dataloader_param.sampler_type
    is_sequential = name == "SequentialSampler" or keeps_order(dataloader_param)
    if is_sequential:
        return SequentialSampler(size)
    return BaseRandomBatchSampler(size, seed)


def check_sampler_name(name: str) -> None:
    """Raise `ConfigError` for a name that is not known."""
    known = sorted({*SAMPLERS, *BUCKET_SAMPLERS, BUDGET_SAMPLER})
    if name not in known:
        built = f"There are {', '.join(known)}."
        raise ConfigError(f"'{name}' is not a sampler", key=SAMPLER_KEY, way_out=f"{did_you_mean(name, known)}{built}")


def keeps_order(dataloader_param: Any) -> bool:
    """Whether rows are taken as they stand."""
    return dataloader_param.dataloader_mode == "base" or not dataloader_param.shuffle
