"""A request for a micro-batch → the batch: samples taken, bad ones replaced, collated. Runs in the workers."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import DataError, MMError
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.data.data_utils.encode import IGNORED
from mindspeed_mm.fsdp.data.data_utils.sample import TooLongError
from mindspeed_mm.fsdp.data.dataloader.order import Pick
from mindspeed_mm.fsdp.data.dataloader.shared_slots import PackedBatch, SharedSlots

_MOST_REPLACEMENTS = 100
_MOST_SIZES = 20


class Request(NamedTuple):
    """One micro-batch to make."""

    number: int
    picks: tuple[Pick, ...]
    blank_rows: int = 0
    """Rows at the end that only fill up: they get no labels, or are told by `blank_rows` of the batch."""


class Fault(NamedTuple):
    """A sample that was not used as it stands."""

    kind: Literal["bad", "too long", "shrunk"]
    sample: str
    reason: str = ""


@dataclass
class Delivery:
    """What comes back for a request."""

    batch: Batch | PackedBatch | None
    faults: list[Fault] = field(default_factory=list)
    error: MMError | None = None


class BatchMaker(Dataset[Delivery]):
    """Makes micro-batches on request; this is the data set that torch's loader sees.

    Args:
        dataset: Samples by index.
        collate: Samples → batch.
        seed: Of replacements, and of the random numbers that a plugin's data set may draw.
        slots: Shared memory to put batches into; None: they are returned as they are.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[Sequence[Any]], Batch], seed: int, slots: SharedSlots | None = None
    ) -> None:
        self.dataset, self._collate, self._seed, self._slots = dataset, collate, seed, slots
        self._may_skip = getattr(dataset, "on_bad_sample", "error") == "skip"
        self._may_drop = getattr(dataset, "truncation", "error") != "error"
        self._draws_nothing = getattr(dataset, "is_deterministic", False)
        self._read_item = getattr(dataset, "item", None)
        self._peers = SamplePeers(seed, len(dataset), getattr(dataset, "sizes", None))

    def __getitem__(self, request: Request) -> Delivery:
        """Make a batch. An error comes back as part of the delivery: torch would wrap it beyond recognition."""
        try:
            delivery = self.make(request)
            if self._slots is not None and isinstance(delivery.batch, dict):
                delivery.batch = self._slots.write(request.number, delivery.batch)
            return delivery
        except MMError as error:
            return Delivery(None, error=error)
        except Exception as error:  # noqa: BLE001 (a process border, and a plugin's data set is foreign code)
            return Delivery(None, error=self._unforeseen(error, request))

    def make(self, request: Request) -> Delivery:
        """The batch of a request.

        Raises:
            DataError: A sample is bad and the policy is to stop.
        """
        faults: list[Fault] = []
        batch = self._collate(self._take_all(request.picks, faults))
        if request.blank_rows:
            _blank(batch, request.blank_rows)
        return Delivery(batch, faults)

    def name(self, row: int) -> str:
        """What to call a sample in messages."""
        return str(self.dataset.place(row)) if hasattr(self.dataset, "place") else str(row)

    def _take_all(self, picks: Sequence[Pick], faults: list[Fault]) -> list[Any]:
        """The samples picked; when one's size has no usable sample left, all of another size."""
        for attempt in range(1, _MOST_SIZES + 1):
            try:
                return [self._take(pick, faults) for pick in picks]
            except _NothingUsableError as error:
                picks = self._peers.of_another_size(picks, attempt)
                if not picks:
                    raise DataError(error.problems[0].what, where=error.problems[0].where) from None
        raise DataError(f"{_MOST_SIZES} sizes in a row have no sample that can be used; the last: {faults[-1].reason}")

    def _take(self, pick: Pick, faults: list[Fault]) -> Any:
        """The sample picked, or its replacement: a function of (seed, epoch, index), the same on every rank."""
        row = pick.row
        for attempt in range(1, _MOST_REPLACEMENTS + 1):
            try:
                return self._read(Pick(pick.epoch, row), faults)
            except TooLongError as error:
                if not self._may_drop:
                    raise
                faults.append(Fault("too long", self.name(row), str(error)))
            except DataError as error:
                if not self._may_skip:
                    raise
                faults.append(Fault("bad", self.name(row), str(error)))
            if self._peers.are_alone(row):
                break
            row = self._peers.replacement(pick, attempt)
        raise _NothingUsableError(
            f"{attempt} samples in a row cannot be used; the last: {faults[-1].reason}", where=self.name(pick.row)
        )

    def _read(self, pick: Pick, faults: list[Fault]) -> Any:
        if self._read_item is not None:
            sample = self._read_item(pick.row, pick.epoch)
        elif self._draws_nothing:
            sample = self.dataset[pick.row]
        else:
            with seeded(self._seed, pick):
                sample = self.dataset[pick.row]
        if isinstance(sample, dict):
            sample.setdefault("sample_id", self.name(pick.row))
            if sample.get("shrunk"):
                faults.append(Fault("shrunk", self.name(pick.row)))
        return sample

    def _unforeseen(self, error: Exception, request: Request) -> DataError:
        names = ", ".join(self.name(pick.row) for pick in request.picks)
        lines = traceback.format_exception(error)
        return DataError(
            f"{type(error).__name__}: {error}, while preparing {names}\n{''.join(lines[-3:]).rstrip()}",
            where=type(self.dataset).__name__,
        )


class SamplePeers:
    """Which samples may stand in for which: those of the same size, or all where sizes are not told.

    Args:
        seed: Of the choice.
        count: How many samples there are.
        sizes: Of each sample; None: not told.
    """

    def __init__(self, seed: int, count: int, sizes: Sequence[MediaSize] | None) -> None:
        self._seed, self._all, self._sizes = seed, range(count), sizes

    @cached_property
    def _by_size(self) -> dict[MediaSize, list[int]]:
        """Made when the first sample cannot be used."""
        found: dict[MediaSize, list[int]] = {}
        for row, size in enumerate(self._sizes or ()):
            found.setdefault(size, []).append(row)
        return found

    def _like(self, row: int) -> Sequence[int]:
        return self._all if self._sizes is None else self._by_size[self._sizes[row]]

    def are_alone(self, row: int) -> bool:
        """Whether no other sample can stand in for this one."""
        return len(self._like(row)) == 1

    def replacement(self, pick: Pick, attempt: int) -> int:
        """The index that stands in for a pick that cannot be used, at the n-th attempt."""
        rows = self._like(pick.row)
        return rows[derive_seed(self._seed, pick.epoch, pick.row, attempt) % len(rows)]

    def of_another_size(self, picks: Sequence[Pick], attempt: int) -> list[Pick]:
        """As many samples, all of one other size that takes no more memory; none when there is no such size."""
        if self._sizes is None:
            return []
        own = self._sizes[picks[0].row]
        others = [rows for size, rows in self._by_size.items() if size != own and _volume(size) <= _volume(own)]
        if not others:
            return []
        rows = others[derive_seed(self._seed, *picks[0], attempt, "size") % len(others)]
        numbers = (derive_seed(self._seed, *pick, attempt, "peer") for pick in picks)
        return [Pick(pick.epoch, rows[number % len(rows)]) for pick, number in zip(picks, numbers, strict=True)]


def _volume(size: MediaSize) -> int:
    return size.frames * size.height * size.width


class _NothingUsableError(DataError):
    """No sample of a size can be used."""


def _blank(batch: Batch, rows: int) -> None:
    """Make rows at the end count for nothing."""
    labels = [name for name in ("labels", "shift_labels") if name in batch]
    for name in labels:
        batch[name][-rows:] = IGNORED
    if not labels:
        batch["blank_rows"] = rows


@contextmanager
def seeded(seed: int, pick: Pick) -> Iterator[None]:
    """Seed the random numbers that a sample may draw by what it is, not by who reads it; afterwards as before."""
    python, numpy, torch_ = random.getstate(), np.random.get_state(), torch.get_rng_state()
    number = derive_seed(seed, pick.epoch, pick.row)
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number % 2**63)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_)
