"""The loader: the micro-batches of one optimizer step at a time, prepared by workers, from a position on."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.counts import by_count
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.byte_pixels import Tables, tables_of, with_stand_ins
from mindspeed_mm.fsdp.data.dataloader.fetch import BatchMaker, BatchRequest, Delivery, Policy, SampleFault
from mindspeed_mm.fsdp.data.dataloader.mixing import MixShares
from mindspeed_mm.fsdp.data.dataloader.order import DataPosition, Deal, MicroBatch, Order, Planned, Step
from mindspeed_mm.fsdp.data.dataloader.planning import imbalance
from mindspeed_mm.fsdp.data.dataloader.sampler import Pick
from mindspeed_mm.fsdp.data.dataloader.transport import PackedBatch, SharedSlots, preloaded
from mindspeed_mm.fsdp.data.dataloader.worker_pool import WorkerOptions, WorkerPool
from mindspeed_mm.fsdp.data.dataset import MMDataset


@dataclass
class DataCounts:
    """What became of the samples that this rank has read so far."""

    read: int = 0
    too_long: int = 0
    """Left out and replaced because they exceed `cutoff_len`."""
    shrunk: int = 0
    """Shortened by whole turns."""
    unread: Counter[str] = field(default_factory=Counter)
    """What rows hold and nothing reads → samples."""
    bad: dict[str, str] = field(default_factory=dict)
    """Rows that could not be used and were replaced → reason; of all ranks, as far as they told."""


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
        mix: Shares that are aimed at, and what tells those achieved; None: one data set.
        preload: Begin to copy the next step to the device before this one is handed out.
    """

    def __init__(
        self,
        dataset: MMDataset,
        collate: Callable[[Sequence[Any]], Batch],
        order: Order,
        deal: Deal,
        *,
        seed: int,
        position: DataPosition,
        workers: WorkerOptions,
        mix: MixShares | None = None,
        preload: bool = False,
    ) -> None:
        self.dataset, self.order, self.deal, self.mix = dataset, order, deal, mix
        self.position = position
        """Where the data stand after the last step that was yielded."""
        self.counts = DataCounts(bad=dict(dataset.left_out))
        self._collate, self._seed, self._workers, self._preload = collate, seed, workers, preload
        self._policy, self._imbalances = Policy(dataset), list[float]()
        self._told_bad_samples = len(self.counts.bad)

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of one epoch; None where rows are streamed."""
        return self.order.steps_per_epoch

    @property
    def batching(self) -> dict[str, Any]:
        """What decides how samples are put together, and must be the same when a run is resumed."""
        return self.order.batching

    @property
    def most_tokens(self) -> int | None:
        """Of a micro-batch, where they are limited."""
        return self.order.most_tokens

    @property
    def estimate_note(self) -> str:
        """How steps were counted where they could not be; else empty."""
        if self.steps_per_epoch is None or self.order.is_exact:
            return ""
        return "steps of an epoch are estimated from its beginning: not all samples were measured"

    @property
    def repeat_note(self) -> str:
        """That one step takes each sample more than once, where a data set is smaller than a step; else empty."""
        share = self.order.epoch_share
        if share >= 1:
            return ""
        return f"an epoch fills only {share:.0%} of a step, so each step reads the data about {1 / share:.2g} times"

    @property
    def size_keys(self) -> str:
        """The keys that make a step smaller."""
        if self.most_tokens is None:
            return "micro_batch_size or gradient_accumulation_steps"
        return "max_tokens_per_batch (without it micro_batch_size or cutoff_len) or gradient_accumulation_steps"

    def describe(self) -> str:
        """Samples and steps, for the log."""
        if (steps := self.steps_per_epoch) is None:
            return "rows as they are found"
        about = self.estimate_note and "about "
        told = f"{len(self.dataset):,} samples, {about}{steps} {by_count(steps, 'step', 'steps')} an epoch"
        if self.order.dropped:
            told += f", {self.order.dropped} left out each time (drop_last)"
        if self.repeat_note:
            return f"{told} (warning: {self.repeat_note})"
        return told

    def steps_for(self, epochs: float) -> int:
        """Optimizer steps until `epochs` epochs are done."""
        return self.order.steps_for(epochs)

    def go_on(self, position: DataPosition, before: Mapping[str, object] | None, *, may_skip: bool) -> str:
        """Take up a position that was saved; returns what to say of it, empty when nothing changes.

        Args:
            position: As saved.
            before: `batching` of the run that saved.
            may_skip: Go on with the next epoch where the place in the epoch cannot be kept.

        Raises:
            CheckpointError: It cannot be kept, and nothing may be skipped.
        """
        self.position, note = self.order.go_on(position, before, may_skip=may_skip)
        return note

    @property
    def bad_samples(self) -> dict[str, str]:
        """Rows that could not be used → reason, for a checkpoint: a resumed run goes on counting."""
        return dict(self.counts.bad)

    @property
    def untold_bad_samples(self) -> int:
        """How many of them the other ranks do not know of."""
        return len(self.counts.bad) - self._told_bad_samples

    def learn_bad_samples(self, found: dict[str, str]) -> None:
        """What all ranks found, or a run found before it was stopped.

        Raises:
            DataError: They are too many.
        """
        self.counts.bad = dict(sorted((self.counts.bad | found).items()))
        self._told_bad_samples = len(self.counts.bad)
        if found:
            self._check_bad_fraction()

    def take_metrics(self) -> dict[str, float]:
        """Since the last call: how uneven the ranks' work was, where it is planned (max/mean, 1.0 is even)."""
        taken, self._imbalances = self._imbalances, []
        if taken:
            return {"imbalance": sum(taken) / len(taken)}
        return {}

    def __iter__(self) -> Iterator[list[Batch]]:
        """Steps from the current position on.

        Raises:
            DataError: A sample is bad and the policy is to stop, too many were skipped, or a worker died or hung.
        """
        for planned, step in self._run(self.order.steps(self.position, ahead=self._has_workers)):
            self.position = planned.after
            costs = [batch.cost for batch in planned.step]
            if any(costs):
                self._imbalances.append(imbalance(costs, self.deal.dp_size))
            if self.mix is not None:
                self.mix.count(planned.step)
            yield step

    def one_pass(self) -> Iterator[list[Batch]]:
        """Every sample once, in the order of the rows, for validation; the position stays as it is.

        A rank that has no sample in the last step gets a blank row, so that all have equally many micro-batches. What
        cannot be used is left out and nothing stands in for it, so every sample counts once.
        """
        for _, step in self._run(self.order.one_pass(ahead=self._has_workers), replaces=False):
            yield step

    # --- batches from workers ----------------------------------------------------------------------------------------

    @property
    def _has_workers(self) -> bool:
        """Otherwise everything is done in this process."""
        return self._workers.num_workers > 0

    def _run(
        self, steps: Generator[Planned, None, None], *, replaces: bool = True
    ) -> Iterator[tuple[Planned, list[Batch]]]:
        """Steps with this rank's batches. What a step met on its way is told when its turn comes, not when it is
        planned, which is earlier the more workers there are."""
        with closing(steps):
            plans = _Plans(steps, self._steps_ahead)
            # Closed here: an error keeps what it went through alive, workers too, until somebody collects it.
            with closing(self._whole_steps(plans, replaces)) as whole:
                ready: Iterator[list[Batch]] = whole
                if self._preload:
                    ready = preloaded(whole)
                for step in ready:
                    this = plans.made.popleft()
                    for pick, error in this.left_out:
                        self._leave_out(pick, error)
                    yield this, step

    @property
    def _steps_ahead(self) -> int:
        """As many as torch asks for before the first is handed out."""
        under_way = self._workers.num_workers * self._workers.prefetch_factor
        return 1 + math.ceil(under_way / self.deal.gradient_accumulation_steps)

    def _whole_steps(self, plans: _Plans, replaces: bool) -> Generator[list[Batch], None, None]:
        mine = (micro_batch for step in plans for micro_batch in self.deal.mine(step))
        with closing(self._batches(mine, replaces)) as batches:
            while step := list(islice(batches, self.deal.gradient_accumulation_steps)):
                yield step
                plans.plan()

    def _batches(self, mine: Iterator[MicroBatch], replaces: bool) -> Generator[Batch, None, None]:
        requests = (BatchRequest(number, tuple(each.picks), each.blank_rows) for number, each in enumerate(mine))
        tables: Tables = {}
        if self._workers.pixels_as_bytes and self._has_workers:
            tables = tables_of(self.dataset.processor)
        maker = BatchMaker(
            self.dataset, self._collate, self._seed, shape=self.order.shape, replaces=replaces, tables=tables
        )
        if not self._has_workers:
            yield from (self._accept(maker[request], None) for request in requests)
            return
        pool = WorkerPool(maker, self._seed, self._workers)
        try:
            for delivery in pool.deliveries(requests):
                yield with_stand_ins(self._accept(delivery, pool.slots), tables)
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
            # Reading copies the batch out, which frees its slot for a later request.
            batch = slots.read(batch, pin_memory=self._workers.pin_memory)
        elif self._workers.pin_memory:
            batch = dict(batch or {})
            for key, value in batch.items():
                if isinstance(value, torch.Tensor):
                    batch[key] = value.pin_memory()
        assert batch is not None
        self.counts.read += len(batch["sample_ids"])
        return batch

    # --- what cannot be used -----------------------------------------------------------------------------------------

    def _leave_out(self, pick: Pick, error: DataError) -> None:
        """All ranks know of it: each counts the name, one of them the sample."""
        fault = self._policy.judge(error, str(self.dataset.place(pick.row)))
        if fault.kind == "bad" or pick.row % self.deal.dp_size == self.deal.dp_rank:
            self._note(fault)

    def _note(self, fault: SampleFault) -> None:
        if fault.kind == "shrunk":
            self.counts.shrunk += 1
        elif fault.kind == "too long":
            self.counts.too_long += 1
        elif fault.kind == "unread":
            self.counts.unread[fault.reason] += 1
        else:
            self.counts.bad[fault.sample] = fault.reason
            self._check_bad_fraction()

    def _check_bad_fraction(self) -> None:
        fraction, bad = self.dataset.max_bad_fraction, self.counts.bad
        if self.dataset.streams:  # those met so far, and a thousand to begin with
            total = max(1000, self.position.index)
        else:
            total = len(self.dataset)
        if len(bad) > math.ceil(fraction * total):
            shown = "; ".join(list(bad.values())[:5])
            raise DataError(
                f"{len(bad)} of {total} samples are bad, more than {fraction:.3%}: {shown}",
                key="data.dataset_param.basic_parameters.max_bad_fraction",
                way_out="Repair them, or raise max_bad_fraction.",
            )


class _Plans:
    """Steps, planned a fixed number ahead of those that are handed out.

    Planning may wait for other ranks (they tell each other sizes), so it has its place in the program, the same on all
    ranks. Workers that ask for more at times of their own, as when they are started anew, find it planned.

    Args:
        steps: Planned when they are asked for.
        ahead: How many to begin with; `plan` adds one.
    """

    def __init__(self, steps: Iterator[Planned], ahead: int) -> None:
        self._steps = steps
        self.made: deque[Planned] = deque()
        """Planned batches that have not been handed out yet."""
        self._waiting: deque[Step] = deque()
        for _ in range(ahead):
            self.plan()

    def plan(self) -> None:
        """Plan one more, where there is one."""
        planned = next(self._steps, None)
        if planned is not None:
            self.made.append(planned)
            self._waiting.append(planned.step)

    def __iter__(self) -> Iterator[Step]:
        """Steps to ask workers for."""
        while self._waiting:
            yield self._waiting.popleft()
