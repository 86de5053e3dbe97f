"""All rows of a data set under one number, found while they are asked for: nothing is read before it is needed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_mm.fsdp.data.data_utils.rows.formats import RowFormat
from mindspeed_mm.fsdp.data.data_utils.rows.readers import RowStream, open_stream, stream_facts
from mindspeed_mm.fsdp.data.data_utils.rows.row_table import display_names
from mindspeed_mm.fsdp.data.data_utils.rows.sources import RowSource, find_sources
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation


class _File(NamedTuple):
    stream: RowStream
    row_format: RowFormat
    entry: int
    most: int | None
    """Rows that its entry may have in all."""
    media_root: Path | None


class StreamTable:
    """Rows by number, entries and their files one after the other; a file begins where the one before it ends.

    Args:
        sources: What the entries name.
        cache_dir: For Arrow copies of parquet files.
        most: Rows of an entry beyond are left out.

    Raises:
        DataError: A file is missing or empty.
    """

    parts = ()
    """Where an entry ends is not known before its rows are read."""

    def __init__(self, sources: Sequence[RowSource], cache_dir: str | None = None, most: int | None = None) -> None:
        names = display_names(list(chain.from_iterable(source.files for source in sources)))
        self._files: list[_File] = []
        for entry, source in enumerate(sources):
            limits = [limit for limit in (most, source.most) if limit is not None]
            for path in source.files:
                stream = open_stream(path, cache_dir, names[path])
                self._files.append(
                    _File(stream, source.row_format, entry, min(limits, default=None), source.media_root)
                )
        self._starts = [0]
        """First row of each file that has been reached."""

    def has(self, index: int) -> bool:
        """Whether there is a row `index`; reads on until it is found or the last file has ended."""
        return self._find(index) is not None

    def row(self, index: int) -> dict[str, Any]:
        """Row `index`. Raises `DataError` for one that cannot be read."""
        file, number = self._locate(index)
        return file.stream.read(number)

    def place(self, index: int) -> RowLocation:
        """Return the file that row `index` stands in, and its line or number there."""
        file, number = self._locate(index)
        return file.stream.place(number)

    def row_format(self, index: int) -> RowFormat:
        """How row `index` is laid out."""
        return self._locate(index)[0].row_format

    def folder(self, index: int) -> Path:
        """Where the file of row `index` lies."""
        return self._locate(index)[0].stream.path.parent

    def media_root(self, index: int) -> Path | None:
        """Where media of row `index` are, if what names its data set says so."""
        return self._locate(index)[0].media_root

    @property
    def media_roots(self) -> list[Path]:
        """Folders that `media_root` may give for a row, each once."""
        return list(dict.fromkeys(file.media_root for file in self._files if file.media_root is not None))

    @property
    def folders(self) -> list[Path]:
        """Where files of rows lie, each folder once."""
        return list(dict.fromkeys(file.stream.path.parent for file in self._files))

    @property
    def formats(self) -> set[RowFormat]:
        """All layouts that rows have."""
        return {file.row_format for file in self._files}

    def facts(self) -> list[dict[str, Any]]:
        """Name, size and time of change of each file, for the fingerprint."""
        return [stream_facts(file.stream) for file in self._files]

    def _locate(self, index: int) -> tuple[_File, int]:
        found = self._find(index)
        if found is None:
            raise IndexError(f"there is no row {index}")
        return found

    def _find(self, index: int) -> tuple[_File, int] | None:
        which = bisect_right(self._starts, index) - 1
        while which < len(self._files):
            file, number = self._files[which], index - self._starts[which]
            room = self._room(which)
            if (room is None or number < room) and file.stream.has(number):
                return file, number
            if which + 1 == len(self._starts):
                self._starts.append(self._starts[which] + self._rows_of(file.stream, number, room))
            which += 1
        return None

    def _room(self, which: int) -> int | None:
        """Rows that a file's entry still takes when the file begins."""
        file = self._files[which]
        if file.most is None:
            return None
        first = [other.entry for other in self._files].index(file.entry)
        return file.most - (self._starts[which] - self._starts[first])

    def _rows_of(self, stream: RowStream, missing: int, room: int | None) -> int:
        """Rows of a file that has fewer than `missing + 1`, or room for no more."""
        most = missing if room is None else min(missing, room)
        return bisect_left(range(most), True, key=lambda number: not stream.has(number))


def open_streamed_rows(basic: Any, attr: Any) -> StreamTable:
    """As `open_rows`, with nothing read before it is needed."""
    sources = find_sources(basic.dataset, basic.dataset_dir, RowFormat.from_attr(attr))
    return StreamTable(sources, basic.cache_dir, basic.max_samples)
