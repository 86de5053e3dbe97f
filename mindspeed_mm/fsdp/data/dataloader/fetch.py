"""A request for a micro-batch → the batch: samples taken, bad ones replaced, collated. Runs in the workers."""

from __future__ import annotations

import hashlib
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import DataError, MMError
from mindspeed_mm.fsdp.data.data_utils.encode import IGNORED
from mindspeed_mm.fsdp.data.data_utils.sample import TooLongError
from mindspeed_mm.fsdp.data.dataloader.sampler import Pick
from mindspeed_mm.fsdp.data.dataloader.shared_slots import PackedBatch, SharedSlots

_MOST_REPLACEMENTS = 100


class Request(NamedTuple):
    """One micro-batch to make."""

    number: int
    picks: tuple[Pick, ...]
    blank_rows: int = 0
    """Rows at the end that only fill up a validation batch: they get no labels."""


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
        samples = [self._take(pick, faults) for pick in request.picks]
        batch = self._collate(samples)
        if request.blank_rows:
            for name in ("labels", "shift_labels"):
                if name in batch:
                    batch[name][-request.blank_rows :] = IGNORED
        return Delivery(batch, faults)

    def name(self, row: int) -> str:
        """What to call a sample in messages."""
        return str(self.dataset.place(row)) if hasattr(self.dataset, "place") else str(row)

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
            row = replacement(self._seed, pick, attempt, len(self.dataset))
        raise DataError(
            f"{_MOST_REPLACEMENTS} samples in a row cannot be used; the last: {faults[-1].reason}",
            where=self.name(pick.row),
        )

    def _read(self, pick: Pick, faults: list[Fault]) -> Any:
        if self._draws_nothing:
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


def replacement(seed: int, pick: Pick, attempt: int, size: int) -> int:
    """The index that stands in for a pick that cannot be used, at the n-th attempt."""
    return digest(seed, pick.epoch, pick.row, attempt) % size


def digest(*numbers: int) -> int:
    """64 bits that depend on all the numbers, on every machine the same."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little")


@contextmanager
def seeded(seed: int, pick: Pick) -> Iterator[None]:
    """Seed the random numbers that a sample may draw by what it is, not by who reads it; afterwards as before."""
    python, numpy, torch_ = random.getstate(), np.random.get_state(), torch.get_rng_state()
    number = digest(seed, pick.epoch, pick.row)
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number % 2**63)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_)
