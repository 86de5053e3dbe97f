"""Files of rows, read one row at a time by number. Text files are indexed by byte offset and never held in memory."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.kept_hashes import kept_sha256, mark_of
from mindspeed_mm.fsdp.data.data_utils.rows.json_reader import (
    MAX_ROW_BYTES,
    JsonReader,
    LineStream,
    check_row_bytes,
    how_it_starts,
)
from mindspeed_mm.fsdp.data.data_utils.sample import REPAIR, RowLocation

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
_KEY = "data.dataset_param.basic_parameters.dataset"
_REPLACE = "Write the file again, or take it out of `dataset`."
_HASHED_BYTES = 2**30


class RowReader(Protocol):
    """Reads the rows of one file by number."""

    path: Path
    name: str
    """What messages and sample ids call the file."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> JsonObject:
        """Row `index`, from 0. Raises `DataError` for a row that cannot be read."""

    def place(self, index: int) -> RowLocation:
        """Return where row `index` stands in the file, for messages and sample ids."""


@runtime_checkable
class TellsFacts(Protocol):
    """A reader of something else than one file."""

    def facts(self) -> JsonObject:
        """What tells its rows from others, as `file_facts` does."""


def open_reader(path: Path, cache_dir: str | None = None, name: str | None = None) -> RowReader:
    """The reader of a file, by its ending and, for JSON, by what the file starts with.

    Args:
        path: The file.
        cache_dir: For the Arrow copy of a parquet file.
        name: What to call the file; None: by its name.

    Raises:
        DataError: The file is missing, empty, of another kind, or broken as a whole.
    """
    check_file(path)
    reader: RowReader
    if path.suffix == ".parquet":
        reader = ParquetReader(path, cache_dir, name)
    elif path.suffix == ".csv":
        reader = CsvReader(path, name)
    else:
        reader = JsonReader(path, name)
    if not len(reader):
        raise _no_rows(path)
    return reader


def _no_rows(path: Path) -> DataError:
    return DataError("the file holds no rows", where=str(path), way_out=_REPLACE)


def check_file(path: Path) -> None:
    """Raise `DataError` when a file is missing, empty or of another kind."""
    if not path.is_file():
        raise DataError("the file is missing", where=str(path), key=_KEY, way_out="Name one that is there.")
    if path.stat().st_size == 0:
        raise DataError("the file is empty", where=str(path), way_out=_REPLACE)
    if path.suffix not in SUFFIXES:
        raise DataError(
            f"'{path.suffix}' files are not read", where=str(path), way_out=f"Use one of {', '.join(SUFFIXES)}."
        )


def file_facts(reader: RowReader, cache_dir: str | None = None) -> JsonObject:
    """Name, size, rows and content of a file; above 1 GiB its time of change stands for the content. Of a folder, what
    its reader tells.

    Args:
        reader: Of the file.
        cache_dir: Where the hash of the content is kept for the next start; None: in the user's cache.
    """
    if isinstance(reader, TellsFacts):
        return reader.facts()
    status = reader.path.stat()
    facts = {"name": reader.name, "bytes": status.st_size, "rows": len(reader)}
    if status.st_size > _HASHED_BYTES:
        return facts | {"changed_ns": status.st_mtime_ns}
    return facts | {"sha256": kept_sha256(reader.path, cache_dir)}


class RowStream(Protocol):
    """Rows of one file that are found while they are asked for."""

    path: Path
    name: str

    def has(self, index: int) -> bool:
        """Whether there is a row `index`; reads on until it is found or the file has ended."""

    def read(self, index: int) -> JsonObject:
        """Row `index`, which there is."""

    def place(self, index: int) -> RowLocation:
        """Return where row `index` stands in the file, for messages and sample ids."""


def open_stream(path: Path, cache_dir: str | None = None, name: str | None = None) -> RowStream:
    """The rows of a file from its beginning on; of a file with an object per line nothing is read yet.

    Args:
        path: The file.
        cache_dir: For the Arrow copy of a parquet file.
        name: What to call the file; None: by its name.

    Raises:
        DataError: As `open_reader`; that a file holds no rows is found when the first is asked for.
    """
    check_file(path)
    if path.suffix == ".jsonl" and not how_it_starts(path)[1]:
        return LineStream(path, name)
    return WholeStream(open_reader(path, cache_dir, name))


def stream_facts(stream: RowStream) -> JsonObject:
    """Name, size and time of change of a file: what tells it from another without reading it."""
    status = stream.path.stat()
    return {"name": stream.name, "bytes": status.st_size, "changed_ns": status.st_mtime_ns}


class WholeStream:
    """A file that can only be opened as a whole, read like a stream."""

    def __init__(self, reader: RowReader) -> None:
        self.path, self.name, self._reader = reader.path, reader.name, reader
        self.read, self.place = reader.read, reader.place

    def has(self, index: int) -> bool:
        """Whether there is a row `index`."""
        return index < len(self._reader)


class CsvReader:
    """Rows of a CSV file as `{column: text}`; the file is held in memory."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path, self.name = path, name or path.name
        # The module's own limit, 128 KiB, is for the whole process; texts of rows are longer.
        csv.field_size_limit(MAX_ROW_BYTES)
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                table = csv.DictReader(file, strict=True)
                self._table = list(table)
                self.columns = dict.fromkeys(table.fieldnames or (), "text")
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"cannot be read as CSV: {error}", where=str(path), way_out=_REPLACE) from error

    def __len__(self) -> int:
        return len(self._table)

    def place(self, index: int) -> RowLocation:
        """Number of the row, the header not counted."""
        return RowLocation(self.name, index + 1)

    def read(self, index: int) -> JsonObject:
        """Row `index`; empty cells are left out.

        Raises:
            DataError: It has more or fewer cells than the header.
        """
        cells = self._table[index]
        if None in cells or None in cells.values():
            raise DataError(
                f"the row does not have the header's {len(self.columns)} cells",
                where=str(self.place(index)),
                way_out=REPAIR,
            )
        return {name: value for name, value in cells.items() if name and value != ""}


class ParquetReader:
    """Rows of a parquet file, through the memory-mapped Arrow copy that `datasets` keeps.

    `datasets` finds a copy again by the file's path and time of change alone, which are the same where a file was
    replaced and its time set (`rsync -t`, `tar`, images of reproducible builds). The copy is named by what the file
    holds, therefore; above 1 GiB by its size, its times and its inode.
    """

    def __init__(self, path: Path, cache_dir: str | None = None, name: str | None = None) -> None:
        self.path, self.name, self._cache_dir = path, name or path.name, cache_dir
        self._table = self._open()

    def _open(self) -> Any:
        import datasets  # heavy, and only parquet needs it
        import pyarrow as pa
        import pyarrow.parquet as pq

        datasets.disable_progress_bars()
        try:
            # a cut file has no footer, and one without rows has no table: said here, before anything is written
            if pq.read_metadata(self.path).num_rows == 0:
                raise _no_rows(self.path)
            copy = {"cache_dir": self._cache_dir, "dataset_name": f"rows-{self._content()}"}
            return datasets.Dataset.from_parquet(str(self.path), **copy).data
        except (pa.ArrowException, OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise DataError(f"cannot be read as parquet: {error}", where=str(self.path), way_out=_REPLACE) from error

    def _content(self) -> str:
        status = self.path.stat()
        if status.st_size <= _HASHED_BYTES:
            return kept_sha256(self.path, self._cache_dir)
        return "-".join(map(str, mark_of(status)))

    def __len__(self) -> int:
        return self._table.num_rows

    @property
    def columns(self) -> dict[str, str]:
        """Column → type; the two widths of Arrow's texts and lists are one."""
        return {field.name: str(field.type).replace("large_", "") for field in self._table.schema}

    def is_null(self, column: str) -> bool:
        """Whether a column has no value in any row."""
        return self._table.column(column).null_count == len(self)

    def place(self, index: int) -> RowLocation:
        """Return the file's name and the number of row `index`, counted from 1."""
        return RowLocation(self.name, index + 1)

    def read(self, index: int) -> JsonObject:
        """Row `index`, as Python objects."""
        # `datasets` searches for the record batch; Arrow's own slice goes through all of them.
        row = self._table.fast_slice(index, 1)
        check_row_bytes(row.nbytes, self.place(index))
        return row.to_pylist()[0]
