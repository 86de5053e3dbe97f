"""A micro-batch as the model gets it: which samples stand where, where packs have their borders, how full it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from mindspeed_mm.core.batch import IGNORED_LABEL, Batch
from mindspeed_mm.fsdp.data.data_utils.token_arrays import drawn_latents


@dataclass(frozen=True)
class PackedDocument:
    """A sample in a batch, or padding."""

    row: int
    first: int
    end: int
    """The position behind its last token."""
    sample_id: str
    """Empty: padding."""
    trained: int


@dataclass(frozen=True)
class BatchEntry:
    """What a batch has under a key."""

    shape: tuple[int, ...]
    """Of a tensor; the length of a list; empty for anything else."""
    dtype: str
    """Of a tensor, such as int64; of anything else the name of its Python type."""
    value: str | int | float | bool | None = None
    """Of what is neither a tensor nor a list."""

    @classmethod
    def of(cls, value: object) -> BatchEntry:
        """Describe a value of a batch."""
        if isinstance(value, torch.Tensor):
            return cls(tuple(value.shape), str(value.dtype).removeprefix("torch."))
        if isinstance(value, list):
            return cls((len(value),), "list")
        shown = value if isinstance(value, str | int | float | bool) else str(value)
        return cls((), type(value).__name__, shown)

    def __str__(self) -> str:
        if self.dtype == "list":
            return f"list of {self.shape[0]}"
        if self.value is None:
            return f"({', '.join(map(str, self.shape))}) {self.dtype}"
        return str(self.value)


@dataclass(frozen=True)
class MicroBatchView:
    """Describes a micro-batch: its rows, the documents in them, and the shapes of its tensors."""

    rows: int
    length: int
    """Tokens of a row."""
    is_packed: bool
    documents: tuple[PackedDocument, ...]
    entries: dict[str, BatchEntry]
    """Key → shape and type of everything in it."""

    @property
    def fill(self) -> float:
        """Share of its tokens that belong to samples."""
        real = sum(document.end - document.first for document in self.documents if document.sample_id)
        return real / max(self.rows * self.length, 1)

    def to_dict(self) -> dict[str, object]:
        """Return the view as a dictionary for JSON, with `fill` rounded to four digits."""
        return {
            "rows": self.rows,
            "length": self.length,
            "packed": self.is_packed,
            "fill": round(self.fill, 4),
            "documents": [vars(document) for document in self.documents],
            "shapes": {name: list(entry.shape) for name, entry in self.entries.items()},
            "dtypes": {name: entry.dtype for name, entry in self.entries.items()},
            "values": {name: entry.value for name, entry in self.entries.items() if entry.value is not None},
        }


def view_batch(batch: Batch) -> MicroBatchView:
    """What is where in a batch; one without token ids has no documents."""
    entries = {name: BatchEntry.of(value) for name, value in batch.items()}
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return MicroBatchView(len(batch["sample_ids"]), 0, False, (), entries)
    borders = batch.get("cu_seq_lens_q")
    is_packed = borders is not None
    documents = _packed(batch, borders.tolist()) if borders is not None else _padded(batch)
    return MicroBatchView(ids.shape[0], ids.shape[1], is_packed, tuple(documents), entries)


def _packed(batch: Batch, borders: list[int]) -> Iterator[PackedDocument]:
    names, trained = batch["sample_ids"], _is_trained(batch)
    for number, (first, end) in enumerate(pairwise(borders)):
        name = str(names[number]) if number < len(names) else ""
        yield PackedDocument(0, first, end, name, int(trained[0, first:end].sum()))


def _padded(batch: Batch) -> Iterator[PackedDocument]:
    mask, trained = batch.get("attention_mask"), _is_trained(batch)
    rows, length = batch["input_ids"].shape
    names = list(map(str, batch["sample_ids"]))
    if "pairs" in batch:
        names = names * 2  # the better answers, then the worse ones
    if len(names) != rows:  # a plugin's collator has joined samples in rows
        names = [", ".join(names)] * rows
    for row, name in enumerate(names):
        end = length
        if isinstance(mask, torch.Tensor) and mask.shape == (rows, length):
            end = int(mask[row].sum())
        yield PackedDocument(row, 0, end, name, int(trained[row].sum()))
        if end < length:
            yield PackedDocument(row, end, length, "", 0)


def _is_trained(batch: Batch) -> torch.Tensor:
    """(B, L) bool: what the loss counts, by labels of the next token or as drawn latents."""
    ids, labels = batch["input_ids"], batch.get("shift_labels")
    is_drawn: torch.Tensor = drawn_latents(batch.get("part_ids"), batch.get("token_kinds"), ids)
    if isinstance(labels, torch.Tensor) and labels.dim() == 2 and len(labels) == len(ids):
        return is_drawn | (labels != IGNORED_LABEL)
    return is_drawn
