"""`mm data preview`: the exact tokens of some rows, which of them are trained, their media, and a micro-batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm.core.batch import IGNORED_LABEL
from mindspeed_mm.core.errors import DataError, MMError, UsageError
from mindspeed_mm.fsdp.data.data_utils.data_collator import Collator
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem, MediaKind
from mindspeed_mm.fsdp.data.data_utils.token_arrays import TokenArrays
from mindspeed_mm.fsdp.data.dataloader.dataloader import MMDataLoader
from mindspeed_mm.fsdp.data.dataloader.order import DataPosition
from mindspeed_mm.fsdp.data.dataloader.sampler import Pick
from mindspeed_mm.fsdp.data.dataloader.sizes import read_sample
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.data.document_pieces import PieceLocation
from mindspeed_mm.fsdp.models.diffusion.live_encoding import CaptionLengths
from mindspeed_mm.tasks.data.collated import as_pair, tokens_of
from mindspeed_mm.tasks.data.denoised import is_denoised, lengths_of, sample_notes
from mindspeed_mm.tasks.data.facts import both, trained_tokens
from mindspeed_mm.tasks.data.micro_batch import MicroBatchView, view_batch
from mindspeed_mm.tasks.data.opening import OpenedData, open_data
from mindspeed_mm.tasks.data.tokens import TokenReader, TokenSpan
from mindspeed_mm.tasks.requests.data import DataPreviewRequest

DEFAULT_COUNT = 3
_MOST_SECONDS = 2.0
"""Longest look for the step that takes a row."""


@dataclass(frozen=True)
class PlaceInEpoch:
    """When a row is trained on."""

    epoch: int
    step: int
    """From 1."""
    of_steps: int | None
    """None: nobody knows, while rows are streamed or the number is an estimate that was too low."""
    micro_batch: int
    """From 1, over all ranks."""

    def __str__(self) -> str:
        step = f"step {self.step:,}"
        if self.of_steps is not None:
            step += f" of {self.of_steps:,}"
        return f"epoch {self.epoch}, {step}, micro-batch {self.micro_batch}"


@dataclass(frozen=True)
class TokenizedConversation:
    """One conversation as the model sees it; a preference row has two."""

    name: str
    """`chosen`, `rejected`, or empty."""
    ids: list[int]
    labels: list[int]
    weights: list[float] | None
    stretches: list[TokenSpan]
    trained: int
    shrunk: bool

    def to_dict(self) -> dict[str, object]:
        """Return the conversation as a dictionary for JSON: counts, token ids, labels, weights and text stretches."""
        stretches = []
        for each in self.stretches:
            stretches.append({"text": each.text, "first": each.first, "tokens": each.tokens, "weight": each.weight})
        return {
            "name": self.name,
            "tokens": len(self.ids),
            "trained": self.trained,
            "shrunk": self.shrunk,
            "input_ids": self.ids,
            "labels": self.labels,
            "loss_weights": self.weights,
            "stretches": stretches,
        }


@dataclass
class ShownRow:
    """One row of a preview: its tokenised answers and media, or why it cannot be used."""

    index: int
    place: str
    row_id: str | None = None
    when: PlaceInEpoch | None = None
    answers: list[TokenizedConversation] = field(default_factory=list)
    media: list[tuple[MediaItem, int]] = field(default_factory=list)
    """Each item, and how many tokens stand for it."""
    fault: str = ""
    """Why the row cannot be used."""
    notes: list[str] = field(default_factory=list)
    """Notes on a generator's sample: its size, what is done to the medium, its captions."""

    def to_dict(self) -> dict[str, object]:
        """Return the row as a dictionary for JSON; each medium is given by kind, name and number of tokens."""
        media = []
        for item, tokens in self.media:
            media.append({"kind": item.kind, "name": media_name(item.source), "tokens": tokens})
        content: dict[str, object] = {"index": self.index, "place": self.place, "id": self.row_id}
        content["fault"] = self.fault or None
        if self.notes:
            content["notes"] = self.notes
        content["when"] = self.when and asdict(self.when)
        content["answers"] = [answer.to_dict() for answer in self.answers]
        content["media"] = media
        return content


@dataclass
class Preview:
    """Holds what `mm data preview` shows: some rows of a data set and the first micro-batch of training."""

    path: Path
    rows: int
    """Number of rows in the data set."""
    cutoff_len: int
    shown: list[ShownRow]
    batch: MicroBatchView | None = None
    """The first one of training."""
    batch_trouble: str = ""
    media: MediaLoader | None = None
    """The loader that opens them, where the data set has one."""

    def to_dict(self) -> dict[str, object]:
        """Return the preview as a dictionary for JSON, with None where there is no micro-batch."""
        return {
            "path": str(self.path),
            "rows": self.rows,
            "cutoff_len": self.cutoff_len,
            "shown": [row.to_dict() for row in self.shown],
            "micro_batch": self.batch and self.batch.to_dict(),
            "micro_batch_trouble": self.batch_trouble or None,
        }


def run(request: DataPreviewRequest) -> Preview:
    """Encode some rows as training would: those that are named, else the first ones in the order of training.

    Raises:
        MMError: The configuration or the files are off.
        UsageError: A row is not there.
    """
    numbers = request.row_numbers
    data = open_data(request.config, request.overrides, validation=request.validation, patient=True, pieces=True)
    chosen = [*numbers, *find_rows(data.dataset, request.row_ids)]
    _check_inside(chosen, len(data.dataset))
    loader, trouble = _loader(data, request.nproc)
    if not chosen:
        chosen = first_rows(loader, len(data.dataset), request.count or DEFAULT_COUNT)
    shown = show_rows(data, chosen)
    found = Preview(request.config, len(data.dataset), data.param.basic_parameters.cutoff_len, shown)
    found.media, found.batch_trouble = data.dataset.media, trouble
    if loader is not None:
        places = places_in_epoch(loader, chosen)
        for row in shown:
            row.when = places.get(row.index)
        found.batch, found.batch_trouble = _first_batch(loader)
    return found


# --- rows ------------------------------------------------------------------------------------------------------------


def show_rows(data: OpenedData, chosen: Sequence[int]) -> list[ShownRow]:
    """Rows with their tokens and media; what is wrong with one is told in its place."""
    seed = data.arguments.training.seed
    if is_denoised(data.dataset):
        show = partial(_show_denoised, data.dataset, lengths=lengths_of(data.dataset), seed=seed)
    else:
        reader = TokenReader(data.tokenizer())
        show = partial(_show_row, data.dataset, data.sample_check(), data.own_collator(), reader=reader, seed=seed)
    return list(map(show, chosen))


def _show_row(
    dataset: MMDataset,
    check_sample: Callable[[object], None] | None,
    collate: Collator | None,
    index: int,
    reader: TokenReader,
    seed: int,
) -> ShownRow:
    row = ShownRow(index, str(dataset.place(index)))
    try:
        row.row_id = _row_id(dataset, index)
        item = read_sample(dataset, Pick(0, index), seed)
        if check_sample is not None:
            check_sample(item)
        encoded, tokens = as_pair(item), tokens_of(item, collate, row.place)
        shrunk = any(isinstance(each, dict) and each.get("shrunk") for each in encoded)
        for name, arrays in tokens.arrays:
            row.answers.append(_tokenized_answer(name, arrays, shrunk, reader))
        if tokens.is_collated:
            row.notes.append("as the data set's collator makes a batch of this row alone")
        if tokens.trouble:
            row.notes.append(f"its tokens are not shown: {tokens.trouble}")
        row.media = _media(dataset, index, encoded)
    except MMError as error:
        row.fault = str(error)
    return row


def _show_denoised(dataset: MMDataset, index: int, lengths: CaptionLengths | None, seed: int) -> ShownRow:
    """A generator's sample with its media; what is wrong with it is told in its place."""
    row = ShownRow(index, str(dataset.place(index)))
    try:
        found = dataset.describe(index)
        row.notes = sample_notes(found, lengths)
        if dataset.is_raw:
            moves = found.is_video or (found.size.frames > 1 and found.header is not None and found.header.frames > 1)
            kind: MediaKind = "video" if moves else "image"
            row.media = [(MediaItem(kind, found.source), 0)]
        for role, kind, source in found.further:
            row.media.append((MediaItem(kind, source), 0))
            row.notes.append(f"{role}: {kind} {len(row.media)}")
        read_sample(dataset, Pick(0, index), seed)
    except MMError as error:
        row.fault = str(error)
    return row


def _tokenized_answer(name: str, arrays: TokenArrays, shrunk: bool, reader: TokenReader) -> TokenizedConversation:
    ids = arrays.ids.tolist()
    labels = own_weights = None
    if arrays.labels is not None:
        labels = arrays.labels.tolist()
    if arrays.weights is not None:
        own_weights = arrays.weights.astype(float).tolist()
    is_drawn = arrays.is_drawn
    counted, weights = labels, arrays.weights
    if is_drawn.any():
        # latents that are drawn are trained by another loss, and have no labels: shown as if they had
        shown = arrays.labels
        if shown is None:
            shown = np.full_like(arrays.ids, IGNORED_LABEL)
        counted = np.where(is_drawn, arrays.ids, shown).tolist()
        if weights is not None:
            weights = np.where(is_drawn, 1.0, weights)
    return TokenizedConversation(
        name,
        ids,
        labels or [],
        own_weights,
        reader.stretches(ids, counted, weights),
        trained_tokens(arrays.labels, arrays.weights) + int(is_drawn.sum()),
        shrunk,
    )


def _media(dataset: MMDataset, index: int, encoded: list[Any]) -> list[tuple[MediaItem, int]]:
    if not dataset.has_rows:
        return []
    counts: list[int] = []
    for each in encoded:
        counts += [len(features.token_ids) for features in each.get("media") or ()]
    items: list[MediaItem] = []
    for part in both(dataset.sample(index)):
        items += part.media
    return list(zip(items, counts, strict=False))


def media_name(source: object) -> str:
    """What to call a medium."""
    if isinstance(source, dict):
        source = source.get("path") or source.get("bytes")
    if isinstance(source, bytes):
        return f"{len(source):,} bytes"
    if isinstance(source, list | tuple):
        if not source:
            return "no frames"
        return f"{len(source)} frames, the first {media_name(source[0])}"
    text = str(source)
    if len(text) <= 120:
        return text
    return f"{text[:40]}… ({len(text):,} characters)"


def find_rows(dataset: MMDataset, names: Sequence[str]) -> list[int]:
    """Indices of rows by their place or id, in the order of the names.

    Raises:
        UsageError: There is no such row.
    """
    found: dict[str, int] = {}
    missing = set(names)
    for index in range(len(dataset)):
        if not missing:
            break
        place = dataset.place(index)
        document = place.document if isinstance(place, PieceLocation) else place
        for name in missing & {str(place), str(document), _row_id(dataset, index)}:
            found[name] = index
        missing -= found.keys()
    if missing:
        raise UsageError(
            f"no row has the id or location {', '.join(sorted(missing))}",
            key="--row-id",
            way_out="Give its `id`, or its place as messages print it: train.jsonl:12.",
        )
    return [found[name] for name in names]


def _row_id(dataset: MMDataset, index: int) -> str | None:
    try:
        found = dataset.row(index).get("id")
    except DataError:
        return None
    if isinstance(found, str | int):
        return str(found)
    return None


def _check_inside(rows: Sequence[int], size: int) -> None:
    outside = [row for row in rows if not 0 <= row < size]
    if outside:
        raise UsageError(
            f"row {outside[0]} does not exist: the data set has {size}", key="--rows", way_out="Count from 0."
        )


# --- order and batches -----------------------------------------------------------------------------------------------


def _loader(data: OpenedData, ranks: int) -> tuple[MMDataLoader | None, str]:
    """The loader of training, or why there is none."""
    if data.is_validation:
        return None, ""
    try:
        loader = data.loader(ranks)
        loader.order.step(DataPosition(0, 0))
    except DataError as error:  # too few rows for a step, which packing finds out when it plans one
        return None, str(error)
    return loader, ""


def first_rows(loader: MMDataLoader | None, size: int, count: int) -> list[int]:
    """The first rows in the order of training; as they stand where there is no such order."""
    if loader is None:
        return list(range(min(count, size)))
    rows: list[int] = []
    position = DataPosition(0, 0)
    while len(rows) < min(count, size) and _is_in_first_epoch(position):
        planned = loader.order.step(position)
        position = planned.after
        for micro_batch in planned.step:
            for pick in micro_batch.picks:
                if pick.row not in rows:
                    rows.append(pick.row)
    return rows[:count]


def _is_in_first_epoch(position: DataPosition) -> bool:
    """Whether rows of it are still to be taken: some may wait when those of the next epoch are drawn already."""
    return position.epoch == 0 or any(pick.epoch == 0 for pick in position.pending)


def places_in_epoch(loader: MMDataLoader, rows: Sequence[int]) -> dict[int, PlaceInEpoch]:
    """When rows of the first epoch are taken; those that come too late to be looked for are missing."""
    wanted, steps = set(rows), loader.steps_per_epoch
    found: dict[int, PlaceInEpoch] = {}
    position, number = DataPosition(0, 0), 0
    latest = time.monotonic() + _MOST_SECONDS
    while wanted and _is_in_first_epoch(position) and time.monotonic() < latest:
        planned = loader.order.step(position)
        number, position = number + 1, planned.after
        epoch, step, of_steps = 0, number, steps
        if steps is not None and number > steps:
            if loader.order.is_exact:  # what packing leaves over goes first in the next epoch
                epoch, step = 1, number - steps
            else:
                of_steps = None
        for place, micro_batch in enumerate(planned.step, 1):
            for pick in micro_batch.picks:
                if pick.row in wanted and pick.epoch == 0:
                    wanted.discard(pick.row)
                    found[pick.row] = PlaceInEpoch(epoch, step, of_steps, place)
    return found


def _first_batch(loader: MMDataLoader) -> tuple[MicroBatchView | None, str]:
    """The first micro-batch of training, or why it cannot be made."""
    try:
        return view_batch(next(iter(loader))[0]), ""
    except MMError as error:
        return None, str(error)
