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
from mindspeed_mm.fsdp.data.dataloader.order import DataPosition, Deal, Order, Step, steps_from
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
        order: The micro-batches of step after step.
        deal: Which of them are this rank's.
        seed: Of replacements of bad samples.
        position: Where to start.
        workers: The processes that prepare batches.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Sequence[Any]], Batch],
        order: Order,
        deal: Deal,
        *,
        seed: int,
        position: DataPosition,
        workers: WorkerOptions,
    ) -> None:
        self.dataset = dataset
        self.position = position
        """Where the data stand after the last step that was yielded."""
        self.counts = DataCounts(bad=dict(getattr(dataset, "left_out", {})))
        self._collate, self._order, self._deal, self._seed, self._workers = collate, order, deal, seed, workers

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch."""
        return self._order.steps_per_epoch

    @property
    def batching(self) -> dict[str, Any]:
        """What decides how samples are put together, and must be the same when a run is resumed."""
        return self._order.batching

    def steps_for(self, epochs: float) -> int:
        """Optimizer steps until `epochs` epochs are done."""
        return self._order.steps_for(epochs)

    def __iter__(self) -> Iterator[list[Batch]]:
        """Steps from the current position on.

        Raises:
            DataError: A sample is bad and the policy is to stop, too many were skipped, or a worker died or hung.
        """
        micro_batches = self._batches(steps_from(self._order, self.position))
        while True:
            step = [next(micro_batches) for _ in range(self._deal.gradient_accumulation_steps)]
            _, self.position = self._order.step(self.position)
            yield step

    def one_pass(self) -> Iterator[list[Batch]]:
        """Every sample once, in the order of the rows, for validation; the position stays as it is.

        What the last step lacks is filled up with blank rows, so that every rank has equally many micro-batches and
        every sample counts once.
        """
        steps = self._order.one_pass()
        micro_batches = self._batches(iter(steps))
        for _ in steps:
            yield [next(micro_batches) for _ in range(self._deal.gradient_accumulation_steps)]

    # --- batches from workers ----------------------------------------------------------------------------------------

    def _batches(self, steps: Iterator[Step]) -> Iterator[Batch]:
        mine = (micro_batch for step in steps for micro_batch in self._deal.mine(step))
        numbered = (Request(number, *micro_batch) for number, micro_batch in zip(count(), mine))
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
        self.counts.read += len(batch["sample_ids"])
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
