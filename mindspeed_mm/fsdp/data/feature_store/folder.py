"""The files of a feature set by name, and which batches of the work they hold.

A finished batch is `work/batch-000012.safetensors`; batches that follow one another are put together into
`shard-000000-000041.safetensors`, named by the first and the last. What is done can be read off the names alone.
`index.jsonl` and `skipped.jsonl` are written from what the shards say of themselves, and read when training starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mindspeed_mm.core.artifacts import atomic_write_text, make_writable_folder
from mindspeed_mm.core.errors import DataError, UsageError
from mindspeed_mm.core.file_writing import check_output_place
from mindspeed_mm.core.folder_kinds import is_feature_set
from mindspeed_mm.core.folder_writing import resolve_output
from mindspeed_mm.core.json_file import JsonObject, parse_json
from mindspeed_mm.core.kept_hashes import Mark, mark_of
from mindspeed_mm.fsdp.data.feature_store.description import Description, FeatureSetContents
from mindspeed_mm.fsdp.data.feature_store.feature_file import (
    DamagedFile,
    FeatureRecord,
    FileFacts,
    SkippedRow,
    TensorFacts,
    Verification,
    check_tensors,
    read_facts,
)

Facts = tuple[FileFacts, dict[str, TensorFacts]]
_HELD_BYTES = 128 << 20
"""Headers that are held parsed, a few times as large in memory: those of about a hundred thousand rows. What a start
knows of all rows in the end takes as much; of further shards each is parsed four times."""

_SHARD = re.compile(r"shard-(\d{6,})-(\d{6,})\.safetensors")
_BATCH = re.compile(r"batch-(\d{6,})\.safetensors")


@dataclass(frozen=True, order=True)
class Span:
    """A shard, and the batches in it."""

    first: int
    last: int
    path: Path

    def __contains__(self, batch: int) -> bool:
        return self.first <= batch <= self.last


class FeatureFolder:
    """The folder of a feature set.

    Args:
        path: `basic_parameters.features_dir`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.description = path / "features.json"
        self.null_text = path / "null-text.safetensors"
        self.index = path / "index.jsonl"
        self.skipped = path / "skipped.jsonl"
        self.marks = path / "media.json"
        self.work = path / "work"
        self._facts: dict[Path, tuple[Mark, Facts]] = {}
        """What files said of themselves; a start asks four times."""
        self._room = _HELD_BYTES
        """That further files may take there."""

    @property
    def is_finished(self) -> bool:
        """The index is written last."""
        return self.index.is_file()

    def prepare(self) -> None:
        """Make the folder, or go on in one.

        Raises:
            UsageError: It holds something else.
            MachineError: It is a file, or cannot be written.
        """
        self.check()
        make_writable_folder(self.path)

    def check(self) -> None:
        """Raise `UsageError` when the folder holds something else, or lies in a checkpoint or a model folder."""
        check_output_place(resolve_output(self.path))
        if not self.path.is_dir() or self._describes_features():
            return
        if foreign := sorted(path.name for path in self.path.iterdir() if not path.name.startswith(".")):
            raise UsageError(
                f"is not a folder of features, and holds {', '.join(foreign[:3])}",
                where=str(self.path),
                way_out="Name an empty folder, or one that does not exist.",
            )

    def _describes_features(self) -> bool:
        return is_feature_set(self.path)

    def clear(self) -> None:
        """Take away a feature set, if one is there, and nothing else; what it was stays known until all is gone."""
        if not self._describes_features():
            return
        # The index goes first: a kill from here on leaves a set that counts as unfinished.
        for path in (self.index, *self.files(), self.skipped, self.null_text, self.marks):
            path.unlink(missing_ok=True)
        self._drop_leftovers()
        self.drop_work()
        self.description.unlink()

    def drop_work(self) -> None:
        """Take away the folder of unfinished work, which is empty when all is in shards."""
        if self.work.is_dir() and not any(self.work.iterdir()):
            self.work.rmdir()

    def shard(self, first: int, last: int) -> Path:
        """File of the batches `first` to `last`."""
        return self.path / f"shard-{first:06}-{last:06}.safetensors"

    def batch(self, number: int) -> Path:
        """Return the path of the file of one finished batch."""
        return self.work / f"batch-{number:06}.safetensors"

    def shards(self) -> list[Span]:
        """The shards there are, in order."""
        return sorted(Span(int(found[1]), int(found[2]), path) for path, found in _matching(self.path, _SHARD))

    def pending(self) -> dict[int, Path]:
        """Batches that are finished and not in a shard yet."""
        return {int(found[1]): path for path, found in _matching(self.work, _BATCH)}

    def done(self) -> set[int]:
        """Numbers of all finished batches."""
        done = set(self.pending())
        for span in self.shards():
            done |= set(range(span.first, span.last + 1))
        return done

    @property
    def next_batch(self) -> int:
        """A number that no batch has had."""
        return max(self.done(), default=-1) + 1

    def batches_before(self, first: int) -> list[Path]:
        """Files of the batches of earlier work."""
        files = [span.path for span in self.shards() if span.first < first]
        return files + [path for number, path in sorted(self.pending().items()) if number < first]

    def files(self) -> list[Path]:
        """Everything that holds tensors of rows."""
        return self.batches_before(self.next_batch)

    def open_work(self) -> None:
        """Make the folder of unfinished work; take away what a kill left: drafts, and batches that are in a shard.

        The description comes first: a folder that holds anything without one is not ours.
        """
        self.work.mkdir(exist_ok=True)
        self._drop_leftovers()

    def _drop_leftovers(self) -> None:
        shards = self.shards()
        for path in [*self.path.glob(".*.tmp"), *self.work.glob(".*.tmp")]:
            path.unlink(missing_ok=True)
        for number, path in self.pending().items():
            if any(number in span for span in shards):
                path.unlink(missing_ok=True)

    def facts(self, path: Path) -> Facts:
        """`read_facts` of one of the files, parsed again only when it has changed, or where there are many.

        Raises:
            DamagedFile: It is missing, cut, or not of this kind.
        """
        try:
            mark = mark_of(path.stat())
        except OSError:
            return read_facts(path)  # says what is wrong
        held_mark, held = self._facts.get(path, (None, None))
        if held is None or held_mark != mark:
            held = read_facts(path)
            with path.open("rb") as file:
                # The first 8 bytes of a safetensors file are the length of its header.
                room = self._room - int.from_bytes(file.read(8), "little")
            if room >= 0:
                self._facts[path], self._room = (mark, held), room
        return held

    def drop_damaged(self, verification: Verification, part: int = 0, parts: int = 1) -> list[DamagedFile]:
        """Look at a share of the files, take away the damaged ones and say which: their batches are missing then.

        Args:
            verification: See `check_file`.
            part: Which share.
            parts: Number of shares, usually of ranks.
        """
        damaged = []
        for path in self.files()[part::parts]:
            try:
                facts, shapes = self.facts(path)
                if verification == "hash":
                    check_tensors(path, facts, shapes)
            except DamagedFile as error:
                damaged.append(error)
                self.index.unlink(missing_ok=True)
                path.unlink(missing_ok=True)
        return damaged


def _matching(folder: Path, pattern: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        found = pattern.fullmatch(path.name)
        if found:
            yield path, found


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
    lines: list[JsonObject] = []
    cut = empty = 0
    for record in records:
        lines.append(_placed_line(record, work.homes, folder.path))
        cut += record.cut_captions > 0
        empty += not all(map(str.strip, record.captions))
    shards = {span.path.name: span.path.stat().st_size for span in folder.shards()}
    contents = FeatureSetContents(len(lines), len(skipped), shards, cut_captions=cut, empty_captions=empty)
    # This order matters: the index marks the set as finished, so all else is on the disk before it.
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


def _placed_line(record: FeatureRecord, homes: Homes, folder: Path) -> JsonObject:
    """The line of a row with the tensors that are its own, and those that it shares with older rows."""
    stem = record.own_stem
    shard, tensors = homes.get(stem, ("", {}))
    found, places = dict(tensors), dict[str, tuple[str, str]]()
    for name, home, stored in _shared_names(record, homes):
        found[name] = homes[home][1][stored]
        places[name] = (homes[home][0], f"{home}/{stored}")
    if "latents" not in found:
        raise DataError(
            f"the medium '{record.path}' changed while features were made",
            where=record.place,
            way_out=f"Run mm extract with --overwrite ({folder}).",
        )
    # Not of a record that is made anew: that takes longer than the line.
    return {**record.to_json(), "shard": shard or places["latents"][0], "tensors": found, "places": places}


def _shared_names(record: FeatureRecord, homes: Homes) -> Iterator[tuple[str, str, str]]:
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


def _write_lines(path: Path, lines: Iterable[Mapping[str, object]]) -> None:
    encode = json.JSONEncoder(ensure_ascii=False).encode  # `json.dumps` would make an encoder for each line
    atomic_write_text(path, "".join(encode(line) + "\n" for line in lines))
