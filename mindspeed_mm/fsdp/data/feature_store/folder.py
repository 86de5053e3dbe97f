"""The files of a feature set by name, and which batches of the work they hold.

A finished batch is `work/batch-000012.safetensors`; batches that follow one another are put together into
`shard-000000-000041.safetensors`, named by the first and the last. What is done can be read off the names alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.core.artifacts import make_writable_folder
from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.file_writing import check_output_place
from mindspeed_mm.core.folder_kinds import is_feature_set
from mindspeed_mm.core.folder_writing import resolve_output
from mindspeed_mm.core.kept_hashes import Mark, mark_of
from mindspeed_mm.fsdp.data.feature_store.feature_file import (
    DamagedFile,
    FileFacts,
    Verification,
    check_tensors,
    read_facts,
)
from mindspeed_mm.fsdp.data.feature_store.records import TensorFacts

Facts = tuple[FileFacts, dict[str, TensorFacts]]
_HELD_BYTES = 16 << 20
"""Headers that are held parsed, a few times as large in memory: those of one full shard, or of some small ones."""

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
                facts, _ = self.facts(path)
                if verification == "hash":
                    check_tensors(path, facts)
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
