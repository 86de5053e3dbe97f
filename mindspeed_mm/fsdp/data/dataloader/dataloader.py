"""The loader: the micro-batches of one optimizer step at a time, prepared by workers, from a position on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.dataloader.fetch import BatchMaker, Delivery, Fault, Request
from mindspeed_mm.fsdp.data.dataloader.sampler import DataPosition, Deal, GlobalOrder, Pick, Sampler
from mindspeed_mm.fsdp.data.dataloader.shared_slots import PackedBatch, SharedSlots
from mindspeed_mm.fsdp.data.dataloader.worker_pool import WorkerOptions, WorkerPool


@dataclass
class DataCounts:
    """What became of the samples that this rank has read so far."""

    read: int = 0
    too_long: int = 0
    """Left out and replaced because they exceed `cutoff_len`."""
    shrunk: int = 0
    """Shortened by whole turns."""
    bad: dict[str, str] = field(default_factory=dict)
    """Rows that could not be used and were replaced → reason."""


class MMDataLoader:
    """Yields, per optimizer step, this rank's micro-batches; endless over epochs.

    Args:
        dataset: Samples by index.
        collate: Samples → batch.
        sampler: The order of an epoch.
        deal: How a step's samples are split over ranks and micro-batches.
        drop_last: See `GlobalOrder`.
        seed: Of replacements of bad samples.
        position: Where to start.
        workers: The processes that prepare batches.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Sequence[Any]], Batch],
        sampler: Sampler,
        deal: Deal,
        *,
        drop_last: bool,
        seed: int,
        position: DataPosition,
        workers: WorkerOptions,
    ) -> None:
        self.dataset = dataset
        self.position = position
        """Where the data stand after the last step that was yielded."""
        self.counts = DataCounts()
        self._collate, self._deal, self._seed, self._workers = collate, deal, seed, workers
        self._order = GlobalOrder(sampler, deal.global_batch, drop_last)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch."""
        return self._order.steps_per_epoch

    def steps_for(self, epochs: float) -> int:
        """Optimizer steps until `epochs` epochs are done; without `drop_last` their ends run on into each other."""
        if self.steps_per_epoch * self._deal.global_batch <= len(self.dataset):
            return math.ceil(epochs * self.steps_per_epoch)
        return math.ceil(epochs * len(self.dataset) / self._deal.global_batch)

    def __iter__(self) -> Iterator[list[Batch]]:
        """Steps from the current position on.

        Raises:
            DataError: A sample is bad and the policy is to stop, too many were skipped, or a worker died or hung.
        """
        steps = self._order.steps_from(self.position)
        micro_batches = self._batches(Request(0, tuple(picks)) for step in steps for picks in self._deal.mine(step))
        while True:
            step = [next(micro_batches) for _ in range(self._deal.gradient_accumulation_steps)]
            _, self.position = self._order.step(self.position)
            yield step

    def one_pass(self) -> Iterator[list[Batch]]:
        """Every sample once, in the order of the rows, for validation; the position stays as it is.

        What the last step lacks is filled up with rows that have no labels, so that every rank has equally many
        micro-batches and every sample counts once.
        """
        size, whole = len(self.dataset), self._deal.global_batch
        steps = [[Pick(0, min(i, size - 1)) for i in range(s, s + whole)] for s in range(0, size, whole)]
        blanks = [max(0, s + whole - size) for s in range(0, size, whole)]
        requests = [
            Request(0, tuple(picks), blank)
            for step, missing in zip(steps, blanks, strict=True)
            for picks, blank in zip(self._deal.mine(step), self._deal_blanks(missing), strict=True)
        ]
        micro_batches = self._batches(iter(requests))
        for _ in steps:
            yield [next(micro_batches) for _ in range(self._deal.gradient_accumulation_steps)]

    def _deal_blanks(self, missing: int) -> list[int]:
        flags = [False] * (self._deal.global_batch - missing) + [True] * missing
        return [sum(part) for part in self._deal.mine(flags)]

    # --- batches from workers ----------------------------------------------------------------------------------------

    def _batches(self, requests: Iterator[Request]) -> Iterator[Batch]:
        numbered = (request._replace(number=n) for n, request in zip(count(), requests))
        if self._workers.num_workers == 0:
            maker = BatchMaker(self.dataset, self._collate, self._seed)
            yield from (self._accept(maker[request], None) for request in numbered)
            return
        pool = WorkerPool(self.dataset, self._collate, self._seed, self._workers)
        try:
            yield from (self._accept(delivery, pool.slots) for delivery in pool.deliveries(numbered))
        finally:
            pool.close()

    def _accept(self, delivery: Delivery, slots: SharedSlots | None) -> Batch:
        if delivery.error is not None:
            raise delivery.error
        for fault in delivery.faults:
            self._note(fault)
        batch = delivery.batch
        if isinstance(batch, PackedBatch):
            assert slots is not None
            batch = slots.read(batch, pin_memory=self._workers.pin_memory)
        elif self._workers.pin_memory:
            batch = {k: v.pin_memory() if isinstance(v, torch.Tensor) else v for k, v in (batch or {}).items()}
        assert batch is not None
        self.counts.read += self._deal.micro_batch_size
        return batch

    def _note(self, fault: Fault) -> None:
        if fault.kind == "shrunk":
            self.counts.shrunk += 1
        elif fault.kind == "too long":
            self.counts.too_long += 1
        else:
            self.counts.bad[fault.sample] = fault.reason
            self._check_bad_fraction()

    def _check_bad_fraction(self) -> None:
        fraction, bad = getattr(self.dataset, "max_bad_fraction", 0.0), self.counts.bad
        if len(bad) > math.ceil(fraction * len(self.dataset)):
            shown = "; ".join(list(bad.values())[:5])
            raise DataError(
                f"{len(bad)} of {len(self.dataset)} samples are bad, more than {fraction:.3%}: {shown}",
                key="data.dataset_param.basic_parameters.max_bad_fraction",
                way_out="Repair them, or raise max_bad_fraction.",
            )
