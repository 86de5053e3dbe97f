"""`index.jsonl` and `skipped.jsonl`: written from what the shards say of themselves, read when training starts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mindspeed_mm.core.artifacts import atomic_write_text
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.fsdp.data.feature_store.description import Description, FeatureSetContents
from mindspeed_mm.fsdp.data.feature_store.folder import FeatureFolder
from mindspeed_mm.fsdp.data.feature_store.records import FeatureRecord, SkippedRow, TensorFacts

Homes = dict[str, tuple[str, dict[str, TensorFacts]]]
"""Stem → file that holds its tensors, and name without the stem → dtype and shape."""


@dataclass(frozen=True)
class FinishedWork:
    """What the shards of a feature set hold."""

    records: Sequence[FeatureRecord]
    """Rows of the latest work."""
    skipped: Sequence[SkippedRow]
    """Rows of the latest work that could not be used."""
    homes: Homes
    """Of earlier work, too."""

    @classmethod
    def read(cls, folder: FeatureFolder, first: int) -> FinishedWork:
        """All of it, in one pass.

        Args:
            folder: All its batches are in shards.
            first: Number of the first batch of the latest work.
        """
        records: list[FeatureRecord] = []
        skipped: list[SkippedRow] = []
        homes: Homes = {}
        for span in folder.shards():
            facts, shapes = folder.facts(span.path)
            for name, fact in shapes.items():
                stem, _, rest = name.partition("/")
                homes.setdefault(stem, (span.path.name, {}))[1][rest] = fact
            if facts.first_batch >= first:
                records += facts.records
                skipped += facts.skipped
        return cls(records, sorted(skipped, key=lambda row: row.row or 0), homes)


def count_done(folder: FeatureFolder) -> tuple[int, int]:
    """Rows of finished batches: encoded, skipped."""
    encoded = skipped = 0
    for path in folder.files():
        facts, _ = folder.facts(path)
        encoded += len(facts.records)
        skipped += len(facts.skipped)
    return encoded, skipped


def write_index(
    folder: FeatureFolder,
    description: Description,
    unreadable: Sequence[SkippedRow] = (),
    kept: Sequence[FeatureRecord] = (),
    work: FinishedWork | None = None,
) -> FeatureSetContents:
    """Finish a feature set: the list of skipped rows, what the shards hold, and last the index.

    Args:
        folder: All its batches are in shards.
        description: Of the set.
        unreadable: Rows that could not even be read.
        kept: Rows of which earlier work has made everything.
        work: What the shards hold, where somebody has read it.

    Raises:
        DataError: A row's medium changed while the work went on, so that its features are nowhere.
    """
    work = work or FinishedWork.read(folder, description.first_batch)
    records, skipped = [*kept, *work.records], [*unreadable, *work.skipped]
    records.sort(key=lambda record: record.row)
    lines: list[dict[str, Any]] = []
    cut = empty = 0
    for record in records:
        lines.append(_placed(record, work.homes, folder.path).to_json())
        cut += record.cut_captions > 0
        empty += not all(map(str.strip, record.captions))
    shards = {span.path.name: span.path.stat().st_size for span in folder.shards()}
    contents = FeatureSetContents(len(lines), len(skipped), shards, cut_captions=cut, empty_captions=empty)
    _write_lines(folder.skipped, map(asdict, skipped))
    replace(description, contents=contents).write(folder.description)
    _write_lines(folder.index, lines)
    return contents


def read_index(path: Path) -> list[FeatureRecord]:
    """The rows of a finished set, in the order of the data.

    Raises:
        DataError: A line is none of ours.
    """
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            records.append(FeatureRecord.from_json(parse_json(line)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(
                f"is not a line of an index ({type(error).__name__}: {error})",
                where=f"{path}:{number}",
                way_out="Run mm extract again: it writes the index from the shards.",
            ) from error
    return records


def read_skipped(path: Path) -> list[SkippedRow]:
    """The rows that a finished set lacks.

    Raises:
        DataError: A line is none of ours.
    """
    skipped: list[SkippedRow] = []
    if not path.is_file():
        return skipped
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            skipped.append(SkippedRow(**parse_json(line)))
        except (ValueError, TypeError) as error:
            raise DataError(
                f"is not a line of a list of skipped rows ({type(error).__name__}: {error})",
                where=f"{path}:{number}",
                way_out="Run mm extract again: it writes the list from the shards.",
            ) from error
    return skipped


def _placed(record: FeatureRecord, homes: Homes, folder: Path) -> FeatureRecord:
    """A row with the tensors that are its own, and those that it shares with older rows."""
    stem = record.own_stem
    shard, tensors = homes.get(stem, ("", {}))
    found, places = dict(tensors), dict[str, tuple[str, str]]()
    for name, home, stored in _shared(record, homes):
        found[name] = homes[home][1][stored]
        places[name] = (homes[home][0], f"{home}/{stored}")
    if "latents" not in found:
        raise DataError(
            f"the medium '{record.path}' changed while features were made",
            where=record.place,
            way_out=f"Run mm extract with --overwrite ({folder}).",
        )
    return replace(record, shard=shard or places["latents"][0], tensors=found, places=places)


def _shared(record: FeatureRecord, homes: Homes) -> Iterator[tuple[str, str, str]]:
    """Name without the key, stem of the older row, and name there, of what a row shares."""
    if record.media_stem in homes:
        for stored in homes[record.media_stem][1]:
            if "/" not in stored:
                yield stored, record.media_stem, stored
    for number, shared in enumerate(record.caption_stems):
        home, _, caption = shared.partition("/")
        if not caption or home not in homes:
            continue
        for stored in homes[home][1]:
            name, _, of_caption = stored.partition("/")
            if of_caption == caption:
                yield f"{name}/{number}", home, stored


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    atomic_write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
