"""The user's own data as the engine reads it: loaders, data sets and iterators, unchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)
from typing_extensions import override

from mindspeed_mm.core.batch import IGNORED_LABEL, Batch
from mindspeed_mm.core.errors import CheckpointError, ConfigError, DataError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.checkpoint.resume import PROVIDED
from mindspeed_mm.fsdp.data import DataPosition, MMDataset
from mindspeed_mm.fsdp.data.dataloader.dataloader import DataCounts
from mindspeed_mm.fsdp.data.dataloader.mixing import MixShares
from mindspeed_mm.fsdp.data.dataloader.order import Deal
from mindspeed_mm.fsdp.params.data_args import DataloaderParam
from mindspeed_mm.fsdp.train.provider.objective import RAW
from mindspeed_mm.fsdp.utils.model_parts import setting_of

PROVIDER = "train_valid_test_datasets_provider"


class ProvidedDataset(MMDataset):
    """Stands for samples that a user's own loader yields: nothing is known of them.

    Args:
        name: Of the function that provides them.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __len__(self) -> int:
        return 0

    @override
    def fingerprint(self) -> JsonObject:
        return {"class": self._name}


class ProvidedLoader:
    """Yields, per optimizer step, this rank's micro-batches out of what the user's function returned.

    A loader, or a data set, begins again when it ends, an iterator does not. A resumed run reads past what it trained
    on, unless the loader does so itself: it has `load_state_dict`, or its sampler was built with `consumed_samples`.

    Args:
        dataset: Stands for the samples.
        deal: Which of them are this rank's.
        loading: Workers of a loader that is made of a data set.
        group: The ranks that read different rows; None for one.
    """

    mix: MixShares | None = None
    most_tokens = None
    estimate_note = ""
    steps_per_epoch = None

    def __init__(
        self, dataset: ProvidedDataset, deal: Deal, loading: DataloaderParam, group: dist.ProcessGroup | None
    ) -> None:
        self.dataset: MMDataset = dataset
        self.deal, self._loading, self._group = deal, loading, group
        self.position = DataPosition(0, 0)
        self.counts = DataCounts()
        self.batching: dict[str, Any] = {"loader": PROVIDED}
        self._source: Any = None
        self.was_spread = False
        """Whether the caller's loader got the distributed sampler from here."""
        self._drawn = 0
        self._steps = range(0)

    def open(self, source: object, steps: range) -> None:
        """Take what the function returned; it is called when the model has its values.

        Args:
            source: A loader, a data set or an iterator.
            steps: Those of the run that are still to be done, for messages.

        Raises:
            ConfigError: All data ranks would read the same rows.
        """
        self._steps = steps
        given = as_loader(source, self.deal, self._loading)
        self._source = spread_over_ranks(given, self.deal)
        self.was_spread = self._source is not given
        check_sharded(self._source, self.deal.dp_size)

    def describe(self) -> str:
        """Return the source's type and, where known, its micro-batches an epoch, for the log."""
        length = length_of(self._source)
        named = f"{type(self._source).__name__} of the caller"
        if length:
            return f"{named}, {length:,} micro-batches an epoch on each rank"
        return named

    def steps_for(self, epochs: float) -> int:
        """Raises `ConfigError`: how long an epoch is, is not known before the model is built."""
        raise ConfigError(
            f"is not set, and the length of {epochs:g} epoch(s) is not known: a function provides the data",
            key="training.train_iters",
            way_out="Set it to a number of steps (--train-iters).",
        )

    def go_on(self, position: DataPosition, before: Mapping[str, object] | None, *, may_skip: bool) -> str:
        """Take up a position that was saved.

        Raises:
            CheckpointError: It was saved by a run that read the suite's own data.
        """
        if before not in (None, self.batching):
            if not may_skip:
                raise CheckpointError(
                    "was saved by a run that read other data: there is no such place in the data of this one",
                    key="training.load",
                    way_out="Add --accept-data-change to begin with this data from the start.",
                )
            return "the data begin from the start"
        self.position = position
        return ""

    @property
    def bad_samples(self) -> dict[str, str]:
        """Empty: what a user's loader leaves out is not told."""
        return {}

    @property
    def untold_bad_samples(self) -> int:
        """Always 0, since a user's loader does not report what it leaves out."""
        return 0

    def learn_bad_samples(self, found: dict[str, str]) -> None:
        """Do nothing: no bad samples are counted here."""

    def take_metrics(self) -> dict[str, float]:
        """Return an empty dict: this loader measures nothing for the log."""
        return {}

    def __iter__(self) -> Iterator[list[Batch]]:
        """Steps from the current position on.

        Raises:
            DataError: The data end, or all ranks read the same rows.
        """
        batches = self._endless()
        size, steps = self.deal.gradient_accumulation_steps, 0
        while True:
            step = list(islice(batches, size))
            if len(step) < size:
                raise self._ended(steps)
            if steps == 0:
                check_different(step, self._group)
            steps += 1
            yield [self._prepare(batch) for batch in step]

    def _endless(self) -> Iterator[object]:
        """Micro-batches of this rank, epoch after epoch; `position` is behind the one that was yielded last."""
        epoch, skip = self.position.epoch, self.position.index // self.deal.dp_size
        if positions_itself(self._source):
            skip = 0
        while True:
            set_epoch(self._source, epoch)
            found = 0
            for found, batch in enumerate(iter(self._source), start=1):
                if found > skip:
                    self.position = DataPosition(epoch, found * self.deal.dp_size)
                    yield batch
            if isinstance(self._source, Iterator) or not found:
                return
            epoch, skip = epoch + 1, 0

    def _prepare(self, batch: object) -> Batch:
        self._drawn += 1
        return as_batch(batch, self._drawn, self.deal.micro_batch_size)

    def _ended(self, steps: int) -> DataError:
        if not steps and not self._drawn:
            return DataError("yielded nothing", key=PROVIDER, way_out="Look at its length, and at drop_last.")
        return DataError(
            f"the data ended after {self._steps.start + steps} of {self._steps.stop} steps",
            key=PROVIDER,
            way_out="Return a loader, which begins again, and not an iterator.",
        )

    # --- passes ------------------------------------------------------------------------------------------------------

    def one_pass(self, source: object, micro_batches: int) -> Callable[[], Iterator[list[Batch]]]:
        """Makes passes over held-out data: the same micro-batches each time, where the source can begin again, and as
        many on every rank.

        Args:
            source: What the function returned.
            micro_batches: At most so many on this rank.
        """
        loader = spread_over_ranks(as_loader(source, self.deal, self._loading), self.deal)
        check_sharded(loader, self.deal.dp_size)
        length = length_of(loader)
        most = torch.tensor(micro_batches if length is None else min(micro_batches, length))
        if self._group is not None:
            dist.all_reduce(most, op=dist.ReduceOp.MIN, group=self._group)
        count = int(most)

        def batches() -> Iterator[list[Batch]]:
            endless = iter(loader)
            for _ in range(count):
                batch = next(endless, None)
                if batch is None:
                    raise DataError("the validation data ended", key=PROVIDER, way_out="Return a loader.")
                yield [self._prepare(batch)]

        return batches


def as_batch(given: object, number: int, rows: int) -> Batch:
    """What a user's loader yielded, as the engine takes it: tensors of a dict to plan by, and what was yielded. Labels
    are shifted for the suite's own cross-entropy, where the user's forward step is not what computes the loss.

    Args:
        given: Anything.
        number: Of the micro-batch, for messages.
        rows: In it, where it does not tell.
    """
    planned: Batch = {}
    if isinstance(given, Mapping):
        planned = {key: value for key, value in given.items() if isinstance(key, str)}
    if isinstance(planned.get("sample_ids"), list):  # of the suite's own collator
        return planned
    labels = planned.get("labels")
    if isinstance(labels, torch.Tensor) and labels.ndim == 2:
        shifted = {"shift_labels": torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)}
        planned = shifted | planned
    ids = [f"micro-batch {number} row {row}" for row in range(rows_of(given) or rows)]
    return {**planned, RAW: given, "sample_ids": ids}


class ShardedBatches(Sampler[list[int]]):
    """Rows of a data set in their order, a micro-batch for each data rank in turn; what is left over at the end waits
    for no one. As Megatron's sampler does for `--dataloader-type single`.

    Args:
        length: Of the data set.
        deal: Which micro-batches are this rank's.
    """

    def __init__(self, length: int, deal: Deal) -> None:
        self._length, self._deal = length, deal

    def __len__(self) -> int:
        return self._length // (self._deal.micro_batch_size * self._deal.dp_size)

    def __iter__(self) -> Iterator[list[int]]:
        size, ranks = self._deal.micro_batch_size, self._deal.dp_size
        for number in range(len(self)):
            first = (number * ranks + self._deal.dp_rank) * size
            yield list(range(first, first + size))


def as_loader(source: object, deal: Deal, loading: DataloaderParam) -> Any:
    """A data set as a loader of it; loaders and iterators as they are.

    Raises:
        ConfigError: It is neither of them.
    """
    if isinstance(source, (DataLoader, Iterator)):
        return source
    if isinstance(source, (str, bytes, Mapping)):
        raise _no_data(source)
    if isinstance(source, IterableDataset):
        return DataLoader(source, batch_size=deal.micro_batch_size, num_workers=loading.num_workers)
    if isinstance(source, Dataset) or (isinstance(source, _Samples) and not isinstance(source, Iterable)):
        batches = ShardedBatches(len(source), deal)
        collate = getattr(source, "collate_fn", None)
        return DataLoader(source, batch_sampler=batches, num_workers=loading.num_workers, collate_fn=collate)
    if isinstance(source, Iterable):
        return source
    raise _no_data(source)


@runtime_checkable
class _Samples(Protocol):
    """Map-style data: a length, and samples by their number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def _no_data(source: object) -> ConfigError:
    shown = repr(source) if isinstance(source, str) else type(source).__name__
    return ConfigError(
        f"returned {shown}",
        key=PROVIDER,
        way_out="Return a DataLoader, a data set, an iterator or None for each part.",
    )


def spread_over_ranks(loader: Any, deal: Deal) -> Any:
    """A loader of map-style data with torch's distributed sampler in place of one that knows nothing of ranks, in order
    or at random as before; every other loader as it is. The loader is made anew, because torch lets no sampler be
    replaced: a class of the caller's, and rows that are drawn with replacement, are left alone."""
    blind = _blind_sampler(loader, deal.dp_size)
    if blind is None or type(loader) is not DataLoader:
        return loader
    is_random = isinstance(blind, RandomSampler)
    if isinstance(blind, RandomSampler) and (blind.replacement or blind.num_samples != len(loader.dataset)):
        return loader
    own = loader.batch_sampler
    drop_last = own is not None and own.drop_last
    return DataLoader(
        loader.dataset,
        batch_size=None if own is None else own.batch_size,
        sampler=DistributedSampler(loader.dataset, deal.dp_size, deal.dp_rank, shuffle=is_random, drop_last=drop_last),
        drop_last=drop_last,
        **{name: getattr(loader, name) for name in _KEPT},
    )


_KEPT = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers", "pin_memory_device",
)  # fmt: skip
"""Settings of a loader beside its data, its sampler and its batches."""


def _blind_sampler(loader: object, ranks: int) -> SequentialSampler | RandomSampler | None:
    """The sampler of rows of a loader that all of several ranks would read alike; None: it knows of ranks, or may."""
    if ranks == 1 or not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    own: Any = loader.batch_sampler
    if own is None:
        own = loader.sampler
    elif type(own) is BatchSampler:  # torch's own, around a sampler of rows
        own = own.sampler
    if type(own) in (SequentialSampler, RandomSampler):
        return own
    return None


def check_sharded(loader: object, ranks: int) -> None:
    """Raise `ConfigError` for a loader whose sampler knows nothing of ranks."""
    if _blind_sampler(loader, ranks) is not None:
        raise same_rows()


def check_different(step: Sequence[object], group: dist.ProcessGroup | None) -> None:
    """Raise `ConfigError` when the first step of all data ranks is the same, to the last number."""
    if group is None:
        return
    digest = hashlib.sha256()
    for batch in step:
        _feed(digest, batch)
    digests = [digest.hexdigest()] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest.hexdigest(), group=group)
    if len(set(digests)) == 1:
        raise same_rows()


def same_rows() -> ConfigError:
    """What to say of data that are not split over ranks."""
    return ConfigError(
        "every data rank reads the same rows",
        key=PROVIDER,
        way_out="Use DistributedSampler, with the rank and size of the data group: get_parallel_state().data_rank and "
        ".data_size (mpu.get_data_parallel_rank() and mpu.get_data_parallel_world_size() of a script that imports it).",
    )


def _feed(digest: hashlib._Hash, value: object) -> None:
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        digest.update(str((plain.dtype, tuple(plain.shape))).encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        for key in value:
            digest.update(str(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, (list, tuple)):
        for each in value:
            _feed(digest, each)
    else:
        digest.update(repr(value).encode())


def rows_of(batch: object) -> int | None:
    """Rows of a batch: the length of its token ids, or of its first tensor; None where it has none."""
    values: Sequence[object] = [batch]
    if isinstance(batch, Mapping):
        values = [batch.get("input_ids"), *batch.values()]
    elif isinstance(batch, (list, tuple)):
        values = batch
    for each in values:
        if isinstance(each, torch.Tensor) and each.ndim:
            return len(each)
    return None


def length_of(loader: Any) -> int | None:
    """Micro-batches of an epoch; None where it is not known."""
    try:
        return len(loader)
    except TypeError:
        return None


def _samplers(loader: object) -> Iterator[object]:
    """A loader, and what chooses its samples: one of them knows of epochs and positions."""
    yield loader
    for name in ("sampler", "batch_sampler"):
        yield setting_of(loader, object, name)


def set_epoch(loader: object, epoch: int) -> None:
    """Tell a sampler that draws anew in each epoch which one begins."""
    for part in _samplers(loader):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def positions_itself(loader: object) -> bool:
    """Whether a loader was built to begin where the run stands, by a sampler of Megatron's kind."""
    return any(setting_of(part, object, "consumed_samples") for part in _samplers(loader))
