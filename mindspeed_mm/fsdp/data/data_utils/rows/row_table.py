"""All rows of a data set under one number: entries one after the other, each with its files one after the other.

Rows are counted when the table is made, or, where they are streamed, found while they are asked for: nothing is then
read before it is needed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.rows.formats import RowFormat
from mindspeed_mm.fsdp.data.data_utils.rows.readers import (
    CsvReader,
    ParquetReader,
    RowReader,
    RowStream,
    file_facts,
    open_reader,
    open_stream,
    stream_facts,
)
from mindspeed_mm.fsdp.data.data_utils.rows.sources import RowSource, find_sources
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation
from mindspeed_mm.fsdp.params.data_args import BasicParameters
from mindspeed_mm.fsdp.params.value_types import Section


class Part(NamedTuple):
    """The rows of one entry of `dataset:`."""

    name: str
    first: int
    end: int


def find_part(parts: Sequence[Part], name: str) -> int:
    """The number of the part called `name`, or of the only one whose path ends with it (a path beside the YAML is not
    kept as written).

    Raises:
        KeyError: There is none, or there are several.
    """
    names = [part.name for part in parts]
    if name in names:
        named = [name] * names.count(name)
    else:
        named = [each for each in names if each.endswith(f"/{name}")]
    if len(named) != 1:
        raise KeyError(name)
    return names.index(named[0])


class RowTable:
    """Rows by number.

    Args:
        sources: What the entries name.
        cache_dir: For Arrow copies of parquet files, and hashes of all.
        most: Rows of an entry beyond are left out.

    Raises:
        DataError: A file is empty or broken as a whole, or the files of an entry have different columns.
    """

    def __init__(self, sources: Sequence[RowSource], cache_dir: str | None = None, most: int | None = None) -> None:
        names = display_names(list(chain.from_iterable(source.files for source in sources)))
        self._cache_dir = cache_dir
        self._readers: list[RowReader] = []
        self._formats: list[RowFormat] = []
        self._media_roots: list[Path | None] = []
        self._shares: list[float | None] = []
        self._ends: list[int] = []
        self._numbers: list[int] = []
        self.parts: list[Part] = []
        for source in sources:
            readers = [open_reader(file, cache_dir, names[file]) for file in source.files]
            _check_columns(readers, source.row_format)
            share = None if source.share is None else max(1, int(sum(map(len, readers)) * source.share))
            limits = [limit for limit in (most, source.most, share) if limit is not None]
            first, counted = len(self), max(self._numbers, default=-1) + 1
            for _ in range(source.repeats):
                start = len(self)
                self._append(source, readers, min(limits, default=None))
                self._numbers += range(counted, counted + len(self) - start)
            self.parts.append(Part(source.name, first, len(self)))

    @property
    def row_numbers(self) -> list[int] | None:
        """Of each row that an epoch reads, which one it is; None: each is read once."""
        if len(set(self._numbers)) < len(self):
            return self._numbers
        return None

    def _append(self, source: RowSource, readers: list[RowReader], most: int | None) -> None:
        """Add the rows of an entry once, and no more of them than `most`; files beyond are not counted."""
        first = end = len(self)
        for reader in readers:
            if most is not None and end - first >= most:
                break
            end += len(reader)
            if most is not None:
                end = min(end, first + most)
            self._readers.append(reader)
            self._formats.append(source.row_format)
            self._media_roots.append(source.media_root)
            self._shares.append(source.share)
            self._ends.append(end)

    def __len__(self) -> int:
        if self._ends:
            return self._ends[-1]
        return 0

    def row(self, index: int) -> JsonObject:
        """Row `index`. Raises `DataError` for one that cannot be read."""
        which, number = self._locate(index)
        return self._readers[which].read(number)

    def place(self, index: int) -> RowLocation:
        """Return the file that row `index` stands in, and its line or number there."""
        which, number = self._locate(index)
        return self._readers[which].place(number)

    def row_format(self, index: int) -> RowFormat:
        """How row `index` is laid out."""
        return self._formats[self._locate(index)[0]]

    def folder(self, index: int) -> Path:
        """Where the file of row `index` lies."""
        return self._readers[self._locate(index)[0]].path.parent

    def media_root(self, index: int) -> Path | None:
        """Where media of row `index` are, if what names its data set says so."""
        return self._media_roots[self._locate(index)[0]]

    @property
    def media_roots(self) -> list[Path]:
        """Folders that `media_root` gives for any of the rows, each once."""
        return list(dict.fromkeys(filter(None, self._media_roots)))

    @property
    def folders(self) -> list[Path]:
        """Where files of rows lie, each folder once."""
        return list(dict.fromkeys(reader.path.parent for reader in self._readers))

    @property
    def formats(self) -> set[RowFormat]:
        """All layouts that rows have."""
        return set(self._formats)

    def facts(self) -> list[JsonObject]:
        """Name, size, rows and content of each file, and the share that is taken, for the fingerprint."""
        shares = [{} if share is None else {"share": share} for share in self._shares]
        return [
            file_facts(reader, self._cache_dir) | share for reader, share in zip(self._readers, shares, strict=True)
        ]

    def _locate(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        which = bisect_right(self._ends, index)
        start = self._ends[which - 1] if which else 0
        return which, index - start


def open_rows(basic: BasicParameters, attr: Section) -> RowTable:
    """The rows that `basic_parameters` names, laid out as `attr` says unless an entry says otherwise.

    Raises:
        DataError: Files are missing or broken.
        ConfigError: No file is named.
    """
    sources = find_sources(basic.dataset, basic.dataset_dir, RowFormat.from_attr(attr))
    return RowTable(sources, basic.cache_dir, basic.max_samples)


def display_names(files: Sequence[Path]) -> dict[Path, str]:
    """The shortest end of each path that no other file shares: rows are called by it, and samples told apart."""
    paths = {file: file.absolute().parts for file in files}
    lengths = dict.fromkeys(paths, 1)
    while True:
        names: dict[Path, str] = {}
        shared: dict[str, set[tuple[str, ...]]] = {}
        """Name → the paths that have it."""
        for file, parts in paths.items():
            names[file] = "/".join(parts[-lengths[file] :])
            shared.setdefault(names[file], set()).add(parts)
        too_short = [file for file, name in names.items() if len(shared[name]) > 1]
        if not too_short:
            return names
        for file in too_short:
            lengths[file] += 1


def _check_columns(readers: Sequence[RowReader], row_format: RowFormat) -> None:
    """Tables of one entry have the same columns of the same types, and none that is needed is null all over."""
    tables = [reader for reader in readers if isinstance(reader, ParquetReader | CsvReader)]
    for table in tables:
        if table.columns != tables[0].columns:
            raise DataError(
                f"has the columns {_differing(table, tables[0])}, but {tables[0].path.name} has "
                f"{_differing(tables[0], table)}",
                where=str(table.path),
                way_out="Files of one entry must agree; list those that differ as separate entries.",
            )
        if not isinstance(table, ParquetReader):
            continue
        column = row_format.needed_of(table.columns, [name for name in table.columns if table.is_null(name)])
        if column is not None:
            raise DataError(
                "the column is null in every row",
                where=str(table.path),
                key=column,
                way_out="Write the file again, or name another column in data.dataset_param.attr.",
            )


def _differing(table: ParquetReader | CsvReader, other: ParquetReader | CsvReader) -> str:
    named = [f"{name} ({kind})" for name, kind in table.columns.items() if other.columns.get(name) != kind]
    return ", ".join(named) or "nothing else"


# --- rows that are found while they are asked for ---------------------------------------------------------------------


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
        ConfigError: A share of the rows is asked for.
    """

    row_numbers = None
    parts = ()
    """Where an entry ends is not known before its rows are read."""

    def __init__(self, sources: Sequence[RowSource], cache_dir: str | None = None, most: int | None = None) -> None:
        names = display_names(list(chain.from_iterable(source.files for source in sources)))
        self._files: list[_File] = []
        for entry, source in enumerate(chain.from_iterable([source] * source.repeats for source in sources)):
            if source.share is not None:
                raise ConfigError(
                    f"{source.share:g} of the rows of '{source.name}': how many there are is not known while streaming",
                    key="data.dataset_param.basic_parameters.streaming",
                    way_out="Set max_samples of that data set, or streaming: false.",
                )
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

    def row(self, index: int) -> JsonObject:
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

    def facts(self) -> list[JsonObject]:
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
