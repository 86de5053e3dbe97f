"""`index.jsonl` and `skipped.jsonl`: written from what the shards say of themselves, read when training starts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mindspeed_mm.core.artifacts import atomic_write_text
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.fsdp.data.feature_store.description import Description, FeatureSetContents
from mindspeed_mm.fsdp.data.feature_store.feature_file import read_facts
from mindspeed_mm.fsdp.data.feature_store.folder import FeatureFolder
from mindspeed_mm.fsdp.data.feature_store.records import FeatureRecord, SkippedRow, TensorFacts


def collect_skipped(folder: FeatureFolder) -> list[SkippedRow]:
    """Rows of finished batches that could not be used, in their order."""
    skipped = [row for path in folder.files() for row in read_facts(path)[0].skipped]
    return sorted(skipped, key=lambda row: row.row or 0)


def count_done(folder: FeatureFolder) -> tuple[int, int]:
    """Rows of finished batches: encoded, skipped."""
    facts = [read_facts(path)[0] for path in folder.files()]
    return sum(len(each.records) for each in facts), sum(len(each.skipped) for each in facts)


def write_index(
    folder: FeatureFolder, description: Description, unreadable: Sequence[SkippedRow] = ()
) -> FeatureSetContents:
    """Finish a feature set: the list of skipped rows, what the shards hold, and last the index.

    Args:
        folder: All its batches are in shards.
        description: Of the set.
        unreadable: Rows that could not even be read.

    Raises:
        DataError: A row's medium changed while the work went on, so that its features are nowhere.
    """
    records: list[FeatureRecord] = []
    skipped = list(unreadable)
    homes: dict[str, tuple[str, dict[str, TensorFacts]]] = {}
    for span in folder.shards():
        facts, shapes = read_facts(span.path)
        for name, fact in shapes.items():
            key, _, rest = name.partition("/")
            homes.setdefault(key, (span.path.name, {}))[1][rest] = fact
        records += facts.records
        skipped += facts.skipped
    lines = [_placed(record, homes, folder.path) for record in sorted(records, key=lambda record: record.row)]
    contents = FeatureSetContents(
        len(lines),
        len(skipped),
        {span.path.name: span.path.stat().st_size for span in folder.shards()},
        cut_captions=sum(line.cut_captions > 0 for line in lines),
        empty_captions=sum(not all(caption.strip() for caption in line.captions) for line in lines),
    )
    _write_lines(folder.skipped, (asdict(row) for row in skipped))
    replace(description, contents=contents).write(folder.description)
    _write_lines(folder.index, (record.to_json() for record in lines))
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
    skipped = []
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            skipped.append(SkippedRow(**parse_json(line)))
        except (ValueError, TypeError) as error:
            raise DataError(
                f"is not a line of a list of skipped rows ({type(error).__name__}: {error})",
                where=f"{path}:{number}",
                way_out="Run mm extract again: it writes the list from the shards.",
            ) from error
    return skipped


def _placed(
    record: FeatureRecord, homes: Mapping[str, tuple[str, dict[str, TensorFacts]]], folder: Path
) -> FeatureRecord:
    if record.key not in homes:
        raise DataError(
            f"the medium '{record.path}' changed while features were made",
            where=record.place,
            way_out=f"Run mm extract with --overwrite ({folder}).",
        )
    shard, tensors = homes[record.key]
    return replace(record, shard=shard, tensors=tensors)


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    atomic_write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
