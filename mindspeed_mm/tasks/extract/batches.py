"""The work of `mm extract`: rows dealt into batches of one size, decoded ahead by threads, encoded one batch at a time.

Which rows share a batch follows from their sizes and their order alone, so that work that was interrupted goes on with
the same batches.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.fsdp.data.datasets.generation.media_marks import Mark, MediaMarks, mark_of
from mindspeed_mm.fsdp.data.datasets.generation.raw_source import RawSource
from mindspeed_mm.fsdp.data.feature_store.feature_file import FeatureRecord, SkippedRow, tensor_name
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter, TextFeatures
from mindspeed_mm.fsdp.models.diffusion.live_encoding import CaptionLengths, read_beside
from mindspeed_mm.fsdp.models.diffusion.media_roles import REJECTED, REJECTED_LATENTS, TARGET
from mindspeed_mm.fsdp.utils.quiet import quiet

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

PIXELS_AT_ONCE = 4 << 20
"""Pixels that are encoded together when no batch size is given: four pictures of 1024 × 1024, or one clip."""
MOST_AT_ONCE = 64
_DECODED_BYTES = 1 << 30
"""Most memory for decoded media that wait to be encoded."""
_BATCHES_AHEAD = 2
_CAPTIONS_AT_ONCE = 16
_BLACK_SIDE = 256


@dataclass(frozen=True)
class RowNeeds:
    """What of a row is there from earlier work, see `FeatureRecord`."""

    media_stem: str = ""
    caption_stems: tuple[str, ...] = ()
    stem: str = ""


@dataclass(frozen=True)
class WorkBatch:
    """Rows that are encoded together, and are lost together when the process is killed."""

    number: int
    rows: tuple[int, ...]
    size: MediaSize
    views: int = 1
    """Of each row's medium; 0: its latents are there."""
    needs: tuple[RowNeeds, ...] = ()
    """Of each row; none: all of every row is encoded."""

    @property
    def decoded_bytes(self) -> int:
        """Memory in bytes for the decoded pixels of all rows and views, three bytes a pixel."""
        return self.views * 3 * self.size.frames * self.size.height * self.size.width * len(self.rows)


@dataclass
class DecodedBatch:
    """A batch whose media were read: the rows that could be, with their pixels, and the others."""

    number: int
    records: list[FeatureRecord] = field(default_factory=list)
    pixels: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """See `Pixels`; none where latents are there."""
    skipped: list[SkippedRow] = field(default_factory=list)


def plan_batches(sizes: Sequence[MediaSize], batch_size: int | None = None, views: int = 1) -> list[WorkBatch]:
    """Deal rows into batches of one size each, ordered by their first row.

    Args:
        sizes: Of each row.
        batch_size: Rows of a batch; None: as many as `PIXELS_AT_ONCE` allows.
        views: Of each row's medium.
    """
    filling: dict[MediaSize, list[int]] = {}
    groups: list[tuple[MediaSize, list[int]]] = []
    for row, size in enumerate(sizes):
        group = filling.get(size)
        if group is None:
            group = filling[size] = []
            groups.append((size, group))
        group.append(row)
        if len(group) == (batch_size or _rows_at_once(size, views)):
            del filling[size]
    return [WorkBatch(number, tuple(rows), size, views) for number, (size, rows) in enumerate(groups)]


def _rows_at_once(size: MediaSize, views: int) -> int:
    return max(1, min(MOST_AT_ONCE, PIXELS_AT_ONCE // (views * size.frames * size.height * size.width)))


@dataclass(frozen=True)
class Survey:
    """All rows as they are now. Each is parsed once for it, and its files are asked once: on a disk of the network a
    question takes as long as a hundred rows."""

    fingerprint: str
    """Of everything that decides what is encoded, but for the bytes of the media themselves."""
    said: Sequence[str]
    """`GenerationRow.digest` of each."""
    marks: Sequence[Mark | None]
    """Of the media of each, see `mark_of`."""
    media: MediaMarks
    """The same by the names of the media."""

    @classmethod
    def of(cls, source: RawSource) -> Survey:
        """Of the rows that can be used."""
        digest, media = hashlib.sha256(), MediaMarks()
        said: list[str] = []
        marks: list[Mark | None] = []
        for row, size, header in zip(source.rows, source.sizes, source.headers, strict=True):
            said.append(row.digest)
            marks.append(mark_of(row, source.media))
            digest.update(repr((said[-1], str(size))).encode())
            media.add(row, header, marks[-1])
        return cls(digest.hexdigest(), said, marks, media)


# --- decoding --------------------------------------------------------------------------------------------------------


@contextmanager
def decoded_ahead(source: RawSource, batches: Sequence[WorkBatch], threads: int) -> Iterator[Iterator[DecodedBatch]]:
    """The batches in order, the next ones decoded while one is used. Decoders run outside the interpreter's lock."""
    # by hand: leaving `with` would decode all that waits before an error is seen
    pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
    try:
        yield _decoded_batches(source, batches, pool, threads)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


Pixels = dict[str, torch.Tensor]
"""`target`, and each role by its name → (views, 3, T, H, W) uint8, of sound (views, channels, samples) float32."""
DecodedRow = tuple[FeatureRecord, Pixels | None] | SkippedRow
"""A row with its pixels; None where its latents are there."""


def _decoded_batches(
    source: RawSource, batches: Sequence[WorkBatch], pool: ThreadPoolExecutor, threads: int
) -> Iterator[DecodedBatch]:
    waiting: deque[WorkBatch] = deque()
    jobs: deque[Iterator[DecodedRow]] = deque()
    """Of each batch that waits, its rows as they are decoded."""
    todo = deque(batches)
    # batches come out in the order they went in: the files of a set are the same for any number of threads
    while todo or waiting:
        while todo and _has_room(waiting, todo[0], threads):
            batch = todo.popleft()
            needs = batch.needs or (RowNeeds(),) * len(batch.rows)
            waiting.append(batch)
            jobs.append(pool.map(partial(_decode_row, source), batch.rows, needs))
        yield _gather(waiting.popleft(), jobs.popleft())


def _has_room(waiting: Collection[WorkBatch], following: WorkBatch, threads: int) -> bool:
    """Enough ahead to keep every thread busy, not so much that memory fills."""
    rows, decoded_bytes = 0, following.decoded_bytes
    for batch in waiting:
        rows += len(batch.rows)
        decoded_bytes += batch.decoded_bytes
    # two batches always fit, or one of large clips would never be decoded while another is encoded
    is_short = len(waiting) <= _BATCHES_AHEAD or rows <= 2 * threads
    return is_short and (len(waiting) < 2 or decoded_bytes <= _DECODED_BYTES)


def _decode_row(source: RawSource, index: int, needs: RowNeeds) -> DecodedRow:
    # filled in step by step: a row that fails is listed with what was known until then
    place, path, said = str(source.place(index)), "", ""
    try:
        row = source.rows[index]
        path, said = row.name, row.digest
        pixels = None if needs.media_stem else source.pixels(index, row)
        key, medium = source.key(index, row), source.digest(index, row).hex()
        beside = source.beside(row)
    except DataError as error:
        return SkippedRow(index, place, path, str(error), said)
    of_row = (index, key, place, path, row.captions, source.sizes[index])
    record = FeatureRecord(
        *of_row, fps=source.fps(index), said=said, repeats=row.repeats,
        is_prior=row.is_prior, scores=row.scores, medium=medium, pixels=source.pixels_key(index), **vars(needs),
        header=astuple(source.headers[index]), beside=beside,
    )  # fmt: skip
    return record, pixels


def _gather(batch: WorkBatch, rows: Iterable[DecodedRow]) -> DecodedBatch:
    decoded = DecodedBatch(batch.number)
    for row in rows:
        if isinstance(row, SkippedRow):
            decoded.skipped.append(row)
            continue
        record, pixels = row
        decoded.records.append(record)
        if pixels is not None:
            decoded.pixels.append(pixels)
    return decoded


# --- encoding --------------------------------------------------------------------------------------------------------


class BatchEncoder:
    """Decoded batches → tensors by their names in a feature set, on the host.

    What comes out is a function of the batch alone, so that work that was interrupted ends with the same bits. The
    captions of a batch are encoded together, each once; nothing is kept from one batch to the next.

    Args:
        adapter: The family.
        pipeline: From `components.load_encoders`.
        device: Where the encoders are.
    """

    def __init__(self, adapter: DiffusionAdapter, pipeline: DiffusionPipeline, device: torch.device) -> None:
        self._adapter, self._pipeline, self._device = adapter, pipeline, device
        self._lengths = CaptionLengths(adapter, pipeline.components)

    @torch.no_grad()
    def __call__(self, batch: DecodedBatch) -> dict[str, torch.Tensor]:
        """Encode a batch. Rows whose latents are not finite are moved to its skipped ones."""
        if not batch.records:
            return {}
        media: dict[str, torch.Tensor] = {}
        usable: Sequence[int] = range(len(batch.records))
        if batch.pixels:
            # the media first: captions of rows that are dropped need no encoding
            media = self._encode_views(batch.pixels)
            usable = _take_usable(batch, media)
        self._count_cut(batch.records)
        reads_media = self._adapter.task in self._adapter.text_reads_media
        texts = {} if reads_media else self._encode_texts(batch.records)
        tensors: dict[str, torch.Tensor] = {}
        for record, at in zip(batch.records, usable, strict=True):
            stem = record.own_stem
            if tensor_name(stem, "latents") in tensors:
                continue  # the same row twice in a batch
            for name, values in media.items():
                for view, each in enumerate(values[at]):
                    tensors[tensor_name(stem, name, view=view)] = each
            if reads_media:
                first_views = {name: views[:1] for name, views in batch.pixels[at].items()}
                texts = self.encode_captions(record.captions, first_views, record.place)
            for number, caption in _own_captions(record):
                for name, value in texts[caption].items():
                    # two rows may share a caption, and safetensors refuses tensors that share memory
                    tensors[tensor_name(stem, name, number)] = value.clone()
        return tensors

    def _count_cut(self, records: list[FeatureRecord]) -> None:
        """Note how many captions of each row are not read to their end; those of all rows are tokenised in one call."""
        captions: list[str] = []
        for record in records:
            captions += record.captions
        cut, begin = set(self._lengths.cut(captions)), 0
        for at, record in enumerate(records):
            end = begin + len(record.captions)
            records[at] = replace(record, cut_captions=len(cut.intersection(range(begin, end))))
            begin = end

    def _encode_views(self, pixels: Sequence[Pixels]) -> dict[str, torch.Tensor]:
        """Latents and conditions, (B, views, …) each."""
        media: dict[str, torch.Tensor] = {}
        for name in pixels[0]:
            media[name] = torch.cat([each[name] for each in pixels]).to(self._device)
        found = self._encode_media(media)
        return {name: values.unflatten(0, (len(pixels), -1)) for name, values in found.items()}

    def _encode_texts(self, records: Sequence[FeatureRecord]) -> dict[str, TextFeatures]:
        """Features of all captions that have none yet."""
        captions: list[str] = []
        for record in records:
            captions += [caption for _, caption in _own_captions(record)]
        return self.encode_captions(captions)

    def encode_captions(
        self, captions: Sequence[str], media: Mapping[str, torch.Tensor] | None = None, place: str = ""
    ) -> dict[str, TextFeatures]:
        """Caption → its features, without padding and batch axis.

        Args:
            captions: Each is encoded once.
            media: Of the sample that they are read together with.
            place: Of that sample, for messages.

        Raises:
            DataError: A caption cannot be read together with the media.
        """
        texts: dict[str, TextFeatures] = {}
        distinct = list(dict.fromkeys(captions))
        with torch.no_grad(), quiet("transformers", "diffusers"):
            for start in range(0, len(distinct), _CAPTIONS_AT_ONCE):
                some = distinct[start : start + _CAPTIONS_AT_ONCE]
                if media is None:
                    encoded = self._adapter.encode_text(self._pipeline, some)
                else:
                    encoded = [read_beside(self._adapter, self._pipeline, each, media, place) for each in some]
                for caption, features in zip(some, encoded, strict=True):
                    texts[caption] = _moved_to_host(features)
        return texts

    def encode_empty(self) -> TextFeatures:
        """Features of the empty caption, of a black picture where the text encoder reads media too."""
        adapter, media = self._adapter, None
        if adapter.task in adapter.text_reads_media:
            size = adapter.geometry.nearest(MediaSize(1, _BLACK_SIDE, _BLACK_SIDE))
            black = torch.zeros(1, 3, 1, size.height, size.width, dtype=torch.uint8)
            media = {role.name: black for role in adapter.media_roles if not role.is_optional}
        return self.encode_captions([""], media)[""]

    def _encode_media(self, media: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Latents and conditions, (B, …) each."""
        found = {"latents": self._adapter.encode_media(self._pipeline, media[TARGET])}
        if REJECTED.name in media:
            found[REJECTED_LATENTS] = self._adapter.encode_media(self._pipeline, media[REJECTED.name])
        found |= self._adapter.encode_conditions(self._pipeline, media)
        return _moved_to_host(found)


def _moved_to_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def _own_captions(record: FeatureRecord) -> Iterator[tuple[int, str]]:
    """Number and text of the captions whose features no older row has."""
    for number, caption in enumerate(record.captions):
        if not (record.caption_stems and record.caption_stems[number]):
            yield number, caption


def _take_usable(batch: DecodedBatch, media: Mapping[str, torch.Tensor]) -> list[int]:
    """Where in the batch the rows stand whose latents are finite; the others are moved to the skipped ones."""
    # a pair is of use only with both
    latents = media["latents"]
    if REJECTED_LATENTS in media:
        latents = torch.cat([latents, media[REJECTED_LATENTS]], dim=1)
    usable, records = [], []
    for at, is_finite in enumerate(torch.isfinite(latents).flatten(1).all(dim=1).tolist()):
        record = batch.records[at]
        if is_finite:
            usable.append(at)
            records.append(record)
        else:
            reason = "its latents are not finite: try another --dtype"
            batch.skipped.append(SkippedRow(record.row, record.place, record.path, reason, record.said))
    batch.records = records
    return usable
