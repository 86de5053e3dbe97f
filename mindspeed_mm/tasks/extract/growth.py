"""What an extraction still has to encode: everything at first; later the rows, captions and sizes that are new.

Features are kept by what they were made of, not by the row that they were made for: latents by the digest of the
medium's file with its size, frames and views; text features by the caption, and by the media where the text encoder
reads both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.fsdp.data.datasets.generation.media_marks import MediaMarks
from mindspeed_mm.fsdp.data.datasets.generation.raw_source import RawSource
from mindspeed_mm.fsdp.data.datasets.generation.row import GenerationRow
from mindspeed_mm.fsdp.data.feature_store.feature_file import FeatureRecord
from mindspeed_mm.fsdp.data.feature_store.folder import FeatureFolder
from mindspeed_mm.tasks.extract.batches import RowNeeds, Survey, WorkBatch, plan_batches


@dataclass(frozen=True)
class Existing:
    """What earlier work has made.

    Args:
        records: Rows as they were, the latest last.
        stems: What the names of stored tensors begin with.
        pixels: `FeatureRecord.pixels` → row that has the latents.
        captions: Caption, and `FeatureRecord.pixels` where the text encoder reads the media too, else nothing →
            `<stem>/<number>` of its text features.
        whole: (key, size) → row of which both were made, for sets that do not note `pixels`.
        digests: `_known_by` of a row → digest of its media.
        cut: Captions of a row → how many of them are not read to their end.
    """

    stems: frozenset[str] = frozenset()
    pixels: Mapping[str, FeatureRecord] = field(default_factory=dict)
    captions: Mapping[tuple[str, str], str] = field(default_factory=dict)
    whole: Mapping[tuple[str, MediaSize], FeatureRecord] = field(default_factory=dict)
    digests: Mapping[tuple[str, str], str] = field(default_factory=dict)
    cut: Mapping[tuple[str, ...], int] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: FeatureFolder, first: int, text_reads_media: bool) -> Existing:
        """Of the batches before `first`."""
        stems: dict[str, set[str]] = {}
        records: list[FeatureRecord] = []
        for path in folder.batches_before(first):
            facts, shapes = folder.facts(path)
            records += facts.records
            for name in shapes:
                stem, _, rest = name.partition("/")
                stems.setdefault(stem, set()).add(rest)
        pixels: dict[str, FeatureRecord] = {}
        captions: dict[tuple[str, str], str] = {}
        whole: dict[tuple[str, MediaSize], FeatureRecord] = {}
        digests: dict[tuple[str, str], str] = {}
        cut: dict[tuple[str, ...], int] = {}
        for record in records:
            stem, stored = record.own_stem, stems.get(record.own_stem, set())
            if "latents" in stored and record.pixels:
                pixels[record.pixels] = record
            numbers = {name.partition("/")[2] for name in stored if "/" in name}
            beside = record.pixels if text_reads_media else ""
            for number, caption in enumerate(record.captions):
                if str(number) in numbers:
                    captions[caption, beside] = f"{stem}/{number}"
            # versions before `pixels` was recorded kept rows whole or not at all
            if "latents" in stored and len(numbers) == len(record.captions):
                whole[record.key, record.size] = record
            if record.medium:
                digests[_known_by(record.path, record.said, is_alone=not record.beside)] = record.medium
            cut[record.captions] = record.cut_captions
        return cls(frozenset(stems), pixels, captions, whole, digests, cut)


@dataclass(frozen=True)
class WorkPlan:
    """What is to be encoded, and what is there."""

    batches: Sequence[WorkBatch]
    kept: Sequence[FeatureRecord]
    """Rows of which everything is there."""

    @property
    def digest(self) -> str:
        """Hash of the batches; empty where every row is encoded and nothing is shared with earlier work."""
        said = [(batch.rows, batch.needs) for batch in self.batches if batch.needs]
        if not self.kept and not said:
            return ""
        return hashlib.sha256(repr(said).encode()).hexdigest()


def plan_work(
    source: RawSource,
    folder: FeatureFolder,
    first: int,
    marks: MediaMarks,
    now: Survey,
    batch_size: int | None = None,
    text_reads_media: bool = False,
) -> WorkPlan:
    """The batches that make features of every row, given those before `first`.

    Args:
        source: The rows.
        folder: Of the features.
        first: Number of the first batch to be made.
        marks: Of media when earlier work read them: files that are untouched are not read again.
        now: The rows as they are now.
        batch_size: Rows of a batch.
        text_reads_media: Text features are made of caption and media: they are kept where both are as they were.
    """
    if first == 0:
        return WorkPlan(plan_batches(source.sizes, batch_size, source.views), ())
    existing = Existing.read(folder, first, text_reads_media)
    kept: list[FeatureRecord] = []
    needs: dict[int, RowNeeds] = {}
    for index, row in enumerate(source.rows):
        # a file as old and as large as before is not read again for its hash
        known = existing.digests.get(_known_by(row.name, now.said[index], is_alone=not row.roles))
        if known is not None and marks.mark(row.name) == now.marks[index] is not None:
            source.know_digest(index, bytes.fromhex(known))
        found = _found(source, index, row, now.said[index], existing, text_reads_media)
        if found is None:
            needs[index] = RowNeeds(stem="")
        elif found.media_stem and all(found.caption_stems):
            kept.append(found)
        else:
            if text_reads_media:  # what reads them needs the media again
                found = replace(found, media_stem="")
            # the old stem may hold what is kept of other rows, so new tensors need another name
            stem = f"{found.key}~{first}" if found.key in existing.stems else ""
            needs[index] = RowNeeds(found.media_stem, tuple(found.caption_stems), stem)
    return WorkPlan(_work_batches(source, needs, first, batch_size), kept)


def _known_by(name: str, said: str, *, is_alone: bool) -> tuple[str, str]:
    """What the digest of a row's media is kept under.

    Args:
        name: Of its medium.
        said: `GenerationRow.digest`.
        is_alone: It has no further media. Rows that have some may share the first, and be told apart by nothing but
            what they say.
    """
    if is_alone:
        return name, ""
    return name, said


def _found(
    source: RawSource,
    index: int,
    row: GenerationRow,
    said: str,
    existing: Existing,
    text_reads_media: bool,
) -> FeatureRecord | None:
    """A row with where earlier work has its parts; None: it cannot be read, which encoding it will say."""
    try:
        key = source.key(index, row)
    except DataError:
        return None
    size, pixels, stems = source.sizes[index], source.pixels_key(index), list[str]()
    same, whole = existing.pixels.get(pixels), existing.whole.get((key, size))
    if same is None and whole is not None and not whole.pixels:  # of a version that kept whole rows
        same = whole
        for number in range(len(row.captions)):
            stems.append(f"{whole.own_stem}/{number}")
    else:
        beside = pixels if text_reads_media else ""
        for caption in row.captions:
            stems.append(existing.captions.get((caption, beside), ""))
    shared: JsonObject = {}
    if same is not None:
        shared = {"media_stem": same.own_stem, "beside": same.beside}
    return FeatureRecord(
        index, key, str(source.place(index)), row.name, row.captions, size, said=said, repeats=row.repeats,
        is_prior=row.is_prior, scores=row.scores, fps=source.fps(index), medium=source.digest(index, row).hex(),
        pixels=pixels, header=tuple(vars(source.headers[index]).values()), caption_stems=tuple(stems),
        cut_captions=existing.cut.get(row.captions, 0), **shared,
    )  # fmt: skip


def _work_batches(
    source: RawSource, needs: Mapping[int, RowNeeds], first: int, batch_size: int | None
) -> list[WorkBatch]:
    """Batches of rows whose media are encoded, then of those whose captions alone are."""
    with_media: list[int] = []
    captions_alone: list[int] = []
    for row, need in needs.items():
        (captions_alone if need.media_stem else with_media).append(row)
    sizes = [source.sizes[row] for row in with_media]
    no_media = [MediaSize(1, 1, 1)] * len(captions_alone)
    dealt = [
        (with_media, source.views, plan_batches(sizes, batch_size, source.views)),
        (captions_alone, 0, plan_batches(no_media, batch_size)),
    ]
    found: list[WorkBatch] = []
    for rows, views, batches in dealt:
        for batch in batches:
            chosen = tuple(rows[at] for at in batch.rows)
            own = tuple(needs[row] for row in chosen)
            found.append(replace(batch, number=first + len(found), rows=chosen, views=views, needs=own))
    return found
