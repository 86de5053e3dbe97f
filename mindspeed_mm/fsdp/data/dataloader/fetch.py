"""A request for a micro-batch → the batch: samples taken, bad ones replaced, collated. Runs in the workers.

A sample that cannot be used stops the run, or is left out and counted. What a plain collator leaves out of a batch is
added: its samples' names, and labels shifted to what predicts them.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from mindspeed_mm.core.batch import IGNORED_LABEL, TRAINED_KEYS, Batch
from mindspeed_mm.core.errors import DataError, MMError, told_as
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.data.data_utils.byte_pixels import Tables, as_bytes
from mindspeed_mm.fsdp.data.data_utils.sample import TooLongError, offer_skipping
from mindspeed_mm.fsdp.data.data_utils.token_arrays import check_batch_lengths, check_lengths
from mindspeed_mm.fsdp.data.dataloader.planning import BatchShape
from mindspeed_mm.fsdp.data.dataloader.sampler import Pick
from mindspeed_mm.fsdp.data.dataloader.sizes import Measurer, read_sample
from mindspeed_mm.fsdp.data.dataloader.transport import PackedBatch, SharedSlots
from mindspeed_mm.fsdp.data.dataset import MMDataset

_MOST_REPLACEMENTS = 100
_MOST_SIZES = 20


class BatchRequest(NamedTuple):
    """Asks a worker for one micro-batch, made of these samples."""

    number: int
    picks: tuple[Pick, ...]
    blank_rows: int = 0
    """As many as there are samples where they only fill up: they get no labels, or `blank_rows` of the batch tells."""


class Taken(NamedTuple):
    """A sample as its data set gave it, and what it is called: nothing is put into a sample, which a collator may take
    to pieces."""

    sample: Any
    name: str


@dataclass
class Delivery:
    """What comes back for a request."""

    batch: Batch | PackedBatch | None
    faults: list[SampleFault] = field(default_factory=list)
    error: MMError | None = None


class BatchMaker(Dataset[Delivery]):
    """Makes micro-batches on request; this is the data set that torch's loader sees.

    Args:
        dataset: Samples by index.
        collate: Samples → batch.
        seed: Of replacements, and of the random numbers that a plugin's data set may draw.
        slots: Shared memory to put batches into; None: they are returned as they are.
        tables: Of pictures that travel as bytes.
        shape: What a micro-batch may hold, where samples are put together by their sizes: then a bad one is left out,
            and only one that would be empty gets a replacement.
        replaces: Let other samples stand in for bad ones. Otherwise, as in a pass over all of them, bad ones are left
            out, and a micro-batch that would be empty is a blank one.
    """

    def __init__(
        self,
        dataset: MMDataset,
        collate: Callable[[Sequence[Any]], Batch],
        seed: int,
        slots: SharedSlots | None = None,
        shape: BatchShape | None = None,
        *,
        tables: Tables | None = None,
        replaces: bool = True,
    ) -> None:
        self.dataset, self._collate, self._seed, self.slots, self._shape = dataset, collate, seed, slots, shape
        self._replaces, self._tables = replaces, tables
        # Samples of our own rows are as collators want them.
        self._check_sample = None
        if not dataset.has_rows:
            self._check_sample = getattr(collate, "check_sample", check_lengths)
        self._policy, self._measurer = Policy(dataset), Measurer(dataset, seed)
        self._peers = SamplePeers(seed, dataset)

    def __getitem__(self, request: BatchRequest) -> Delivery:
        """Make a batch. An error comes back as part of the delivery: torch would wrap it beyond recognition."""
        try:
            delivery = self.make(request)
            if self.slots is not None and isinstance(delivery.batch, dict):
                delivery.batch = self.slots.write(request.number, delivery.batch)
            return delivery
        except MMError as error:
            return Delivery(None, error=error)
        except Exception as error:  # noqa: BLE001 (a process border, and a plugin's data set is foreign code)
            return Delivery(None, error=self._unforeseen(error, request))

    def make(self, request: BatchRequest) -> Delivery:
        """The batch of a request.

        Raises:
            DataError: A sample is bad and the policy is to stop.
        """
        faults: list[SampleFault] = []
        taken, blank_rows = self._take_all(request, faults)
        names = [each.name for each in taken]
        with told_as(lambda problem: replace(problem, where=problem.where or ", ".join(names))):
            batch = completed(self._collate([each.sample for each in taken]), names)
        if not self.dataset.has_rows:
            check_batch_lengths(batch, names)
        if blank_rows:
            _blank(batch, blank_rows)
        if self._tables:
            batch = as_bytes(batch, self._tables)
        return Delivery(batch, faults)

    def name(self, row: int) -> str:
        """What to call a sample in messages."""
        return str(self.dataset.place(row))

    def _take_all(self, request: BatchRequest, faults: list[SampleFault]) -> tuple[list[Taken], int]:
        """The samples picked, without bad ones where that is possible, and how many of them are blank."""
        if request.blank_rows:
            return self._all_or_others(request.picks, []), request.blank_rows  # whose faults are told where it counts
        if self._shape is None and self._replaces:
            return self._all_or_others(request.picks, faults), 0
        good = self._good(request.picks, faults)
        if good:
            return good, 0
        if self._replaces:
            return self._all_or_others(request.picks[:1], faults), 0
        return self._all_or_others(request.picks[:1], []), 1

    def _all_or_others(self, picks: Sequence[Pick], faults: list[SampleFault]) -> list[Taken]:
        """The samples picked or their replacements; when one's size has no usable sample left, all of another size."""
        for attempt in range(1, _MOST_SIZES + 1):
            try:
                return [self._take(pick, faults) for pick in picks]
            except _NothingUsableError as error:
                picks = self._peers.of_another_size(picks, attempt)
                if not picks:
                    raise DataError(error.problems[0].what, where=error.problems[0].where) from None
        raise DataError(f"{_MOST_SIZES} sizes in a row have no sample that can be used; the last: {faults[-1].reason}")

    def _good(self, picks: Sequence[Pick], faults: list[SampleFault]) -> list[Taken]:
        """Those of the samples that can be used."""
        good = []
        for pick in picks:
            try:
                good.append(self._read(pick, faults))
            except DataError as error:
                faults.append(self._policy.judge(error, self.name(pick.row)))
        return good

    def _take(self, pick: Pick, faults: list[SampleFault]) -> Taken:
        """The sample picked, or its replacement: a function of (seed, epoch, index), the same on every rank."""
        row, reason = pick.row, ""
        for attempt in range(1, _MOST_REPLACEMENTS + 1):
            try:
                if row == pick.row or self._fits(row):
                    return self._read(Pick(pick.epoch, row), faults)
            except DataError as error:
                faults.append(self._policy.judge(error, self.name(row)))
                reason = str(error)
            if self._peers.are_alone(row):
                break
            row = self._peers.replacement(pick, attempt)
        raise _NothingUsableError(
            f"{attempt} samples in a row cannot be used; the last: {reason}", where=self.name(pick.row)
        )

    def _fits(self, row: int) -> bool:
        """Whether a replacement keeps the limits of a micro-batch."""
        return self._shape is None or self._shape.fits(self._measurer.size(row))

    def _read(self, pick: Pick, faults: list[SampleFault]) -> Taken:
        sample = read_sample(self.dataset, pick, self._seed)
        name = self.name(pick.row)
        if self._check_sample is not None:
            with told_as(lambda problem: replace(problem, where=problem.where or name)):
                self._check_sample(sample)
        if not isinstance(sample, dict):
            return Taken(sample, name)
        if sample.get("shrunk"):
            faults.append(SampleFault("shrunk", name))
        if self.dataset.has_rows:
            faults += [SampleFault("unread", name, what) for what in sample.pop("unread", ())]
        return Taken(sample, str(sample.get("sample_id", name)))

    def _unforeseen(self, error: Exception, request: BatchRequest) -> DataError:
        names = ", ".join(self.name(pick.row) for pick in request.picks)
        lines = traceback.format_exception(error)
        return DataError(
            f"{type(error).__name__}: {error}, while preparing {names}\n{''.join(lines[-3:]).rstrip()}",
            where=type(self.dataset.origin).__name__,
        )


class SamplePeers:
    """Which samples may stand in for which: those of the same size, or all where sizes are not told; among streamed
    rows, whose number is not known, those near by.

    Args:
        seed: Of the choice.
        dataset: The samples.
    """

    def __init__(self, seed: int, dataset: MMDataset) -> None:
        self._seed, self._sizes = seed, dataset.sizes
        self._has: Callable[[int], bool] | None = None
        self._all = range(0)
        if dataset.streams:
            self._has = dataset.has
        else:
            self._all = range(len(dataset))

    @cached_property
    def _by_size(self) -> dict[MediaSize, list[int]]:
        """Made when the first sample cannot be used."""
        found: dict[MediaSize, list[int]] = {}
        for row, size in enumerate(self._sizes or ()):
            found.setdefault(size, []).append(row)
        return found

    def _like(self, row: int) -> Sequence[int]:
        if self._has is not None:
            end = row + _MOST_REPLACEMENTS
            if not self._has(end - 1):
                end = row + 1
            return range(max(0, row - _MOST_REPLACEMENTS), end)
        if self._sizes is None:
            return self._all
        return self._by_size[self._sizes[row]]

    def are_alone(self, row: int) -> bool:
        """Whether no other sample can stand in for this one."""
        return len(self._like(row)) == 1

    def replacement(self, pick: Pick, attempt: int) -> int:
        """The index that stands in for a pick that cannot be used, at the n-th attempt."""
        rows = self._like(pick.row)
        return rows[derive_seed(self._seed, pick.epoch, pick.row, attempt) % len(rows)]

    def of_another_size(self, picks: Sequence[Pick], attempt: int) -> list[Pick]:
        """As many samples, all of one other size that takes no more memory; empty when there is no such size."""
        if self._sizes is None:
            return []
        own = self._sizes[picks[0].row]
        # No larger ones: the stand-ins must fit the memory that the step was planned for.
        others = [rows for size, rows in self._by_size.items() if size != own and _volume(size) <= _volume(own)]
        if not others:
            return []
        rows = others[derive_seed(self._seed, *picks[0], attempt, "size") % len(others)]
        stand_ins = []
        for pick in picks:
            number = derive_seed(self._seed, *pick, attempt, "peer")
            stand_ins.append(Pick(pick.epoch, rows[number % len(rows)]))
        return stand_ins


def _volume(size: MediaSize) -> int:
    return size.frames * size.height * size.width


class _NothingUsableError(DataError):
    """No sample of a size can be used."""


def _blank(batch: Batch, samples: int) -> None:
    """Make samples at the end count for nothing."""
    labels = [name for name in ("labels", "shift_labels") if name in batch]
    borders = batch.get("cu_seq_lens_q")
    for name in labels:
        if borders is not None:  # samples one after the other in a single row
            first = int(borders[len(batch["sample_ids"]) - samples])
            batch[name][..., first:] = IGNORED_LABEL
        elif "pairs" in batch:  # the rows of the chosen answers, then those of the rejected ones
            batch[name].unflatten(0, (2, batch["pairs"]))[:, -samples:] = IGNORED_LABEL
        else:
            batch[name][-samples:] = IGNORED_LABEL
    if not labels:
        batch["blank_rows"] = samples


# --- samples that cannot be used --------------------------------------------------------------------------------------


class SampleFault(NamedTuple):
    """A sample that was not used as it stands."""

    kind: Literal["bad", "too long", "shrunk", "unread"]
    """`unread`: it was used, but its row holds something that nothing reads."""
    sample: str
    reason: str = ""


class Policy:
    """What a data set says about its bad samples and those that exceed a limit.

    Args:
        dataset: Its `on_bad_sample` and `truncation` are read.
    """

    def __init__(self, dataset: MMDataset) -> None:
        self._may_skip = dataset.on_bad_sample == "skip"
        self._may_drop = dataset.truncation != "error"

    def judge(self, error: DataError, sample: str) -> SampleFault:
        """The fault to count.

        Args:
            error: Why the sample cannot be used.
            sample: Its name.

        Raises:
            DataError: The policy is to stop.
        """
        if isinstance(error, TooLongError):
            if not self._may_drop:
                raise error
            return SampleFault("too long", sample, str(error))
        if not self._may_skip:
            error.change_problems(offer_skipping)
            raise error
        return SampleFault("bad", sample, str(error))


# --- what a plain collator leaves out ---------------------------------------------------------------------------------


_TYPE_KEY = "data.dataset_param.dataset_type"


def completed(batch: object, names: Sequence[str]) -> Batch:
    """The batch as training takes it.

    Args:
        batch: As collated; a mapping.
        names: Of its samples, in order.

    Returns:
        The same with tensors in place of numpy arrays, with `sample_ids`, and with `shift_labels` made of `labels`,
        where it had none.

    Raises:
        DataError: It is not a mapping, holds nothing that a loss can be computed from, holds labels that are not a
            tensor of rows, or token ids that are not a tensor of whole numbers.
    """
    if not isinstance(batch, Mapping):
        raise DataError(
            f"the collator gave a {type(batch).__name__}, a batch is a dict of tensors",
            key=_TYPE_KEY,
            way_out="Let `collate_fn(samples)` give a dict with the arguments of the model's forward, and `labels`.",
        )
    found: Batch = dict(batch)
    for key, value in found.items():
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            found[key] = torch.as_tensor(value)
    found.setdefault("sample_ids", list(names))
    # Labels are for a language model, whatever else a plugin calls its inputs.
    if "shift_labels" not in found and ("labels" in found or not TRAINED_KEYS & found.keys()):
        found["shift_labels"] = shift_by_document(_labels_of(found), found)
    ids = found.get("input_ids")
    if ids is not None and not (isinstance(ids, torch.Tensor) and not ids.is_floating_point()):
        raise DataError(
            f"input_ids are {_described(ids)}, not a tensor of whole numbers",
            key=_TYPE_KEY,
            way_out="Let `collate_fn` give `input_ids` as a tensor of token ids, (B, L).",
        )
    return found


def shift_by_document(labels_BL: torch.Tensor, batch: Batch) -> torch.Tensor:
    """(B, L): what the token behind each one has; -100 on the last of a document.

    Documents of one row end where `cu_seq_lens_q` says; without it, where a row of `position_ids` begins anew.
    """
    shifted_BL = torch.full_like(labels_BL, IGNORED_LABEL)
    shifted_BL[:, :-1] = labels_BL[:, 1:]
    borders, positions = batch.get("cu_seq_lens_q"), batch.get("position_ids")
    if isinstance(borders, torch.Tensor):
        # The last token of each document: the one behind it belongs to another. Borders begin with 0.
        ends = borders[(borders > 0) & (borders <= labels_BL.shape[1])].long() - 1
        shifted_BL[:, ends] = IGNORED_LABEL
    elif isinstance(positions, torch.Tensor) and positions.shape == labels_BL.shape:
        shifted_BL[:, :-1].masked_fill_(positions[:, 1:] == 0, IGNORED_LABEL)
    return shifted_BL


def _labels_of(batch: Batch) -> torch.Tensor:
    labels = batch.get("labels")
    if isinstance(labels, torch.Tensor) and labels.dim() == 2 and not labels.is_floating_point():
        return labels
    told = ", ".join(map(repr, batch.keys() - {"sample_ids"}))
    what = f"labels are {_described(labels)}, not whole numbers of shape (rows, tokens)"
    if labels is None:
        what = f"the batch has neither labels nor shift_labels; its keys are {told}"
    raise DataError(
        what,
        key=_TYPE_KEY,
        way_out="Let `collate_fn` give `labels`, (B, L) token ids with -100 where not trained, or `shift_labels`.",
    )


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    return f"a {type(value).__name__}"
