"""Files of rows, read one row at a time by number. Text files are indexed by byte offset and never held in memory."""

from __future__ import annotations

import csv
import hashlib
import json
import mmap
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.sample import Place

MAX_ROW_BYTES = 64 * 2**20
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
_BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
_SCAN_BYTES = 16 * 2**20
_HASHED_BYTES = 2**30


class RowReader(Protocol):
    """Rows of one file."""

    path: Path
    name: str
    """What messages and sample ids call the file."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> dict[str, Any]:
        """Row `index`, from 0. Raises `DataError` for a row that cannot be read."""

    def raw(self, index: int) -> bytes:
        """What tells the content of row `index` from another's: equal bytes are equal rows."""

    def place(self, index: int) -> Place:
        """Where the row stands."""


def open_reader(path: Path, cache_dir: str | None = None, name: str | None = None) -> RowReader:
    """The reader of a file, by its ending and, for JSON, by what the file starts with.

    Args:
        path: The file.
        cache_dir: For the Arrow copy of a parquet file.
        name: What to call the file; None: by its name.

    Raises:
        DataError: The file is missing, empty, of another kind, or broken as a whole.
    """
    if not path.is_file():
        raise DataError("the file is missing", where=str(path), key="data.dataset_param.basic_parameters.dataset")
    if path.stat().st_size == 0:
        raise DataError("the file is empty", where=str(path))
    if path.suffix == ".parquet":
        return ParquetReader(path, cache_dir, name)
    if path.suffix == ".csv":
        return CsvReader(path, name)
    if path.suffix not in (".json", ".jsonl"):
        raise DataError(
            f"'{path.suffix}' files are not read", where=str(path), way_out=f"Use one of {', '.join(SUFFIXES)}."
        )
    reader = JsonReader(path, name)
    if not len(reader):
        raise DataError("the file holds no rows", where=str(path))
    return reader


def file_facts(reader: RowReader) -> dict[str, Any]:
    """Name, size, rows and content of a file; above 1 GiB its time of change stands for the content."""
    status = reader.path.stat()
    facts = {"name": reader.name, "bytes": status.st_size, "rows": len(reader)}
    if status.st_size > _HASHED_BYTES:
        return facts | {"changed_ns": status.st_mtime_ns}
    return facts | {"sha256": _content_hash(reader.path, status.st_size, status.st_mtime_ns)}


@lru_cache(maxsize=4096)
def _content_hash(path: Path, size: int, changed_ns: int) -> str:
    """Hash of a file; read once for as long as it does not change."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class JsonReader:
    """A list of objects, or an object per line, whichever the file holds.

    Only the byte span of each row is kept (16 bytes a row); a row is parsed when it is asked for.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path, self.name = path, name or path.name
        self._file: tuple[int, int] | None = None  # (process id, descriptor): every worker opens its own
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            start = len(_BOM) if data[: len(_BOM)] == _BOM else 0
            is_list = re.compile(rb"\s*\[").match(data, start) is not None
            spans = _list_spans(bytes(data), start, path) if is_list else _line_spans(data, start, path)
        self._starts, self._ends, self._rows = spans

    def __len__(self) -> int:
        return len(self._starts)

    def place(self, index: int) -> Place:
        """Line (or number, in a list) of the row."""
        return Place(self.name, int(self._rows[index]))

    def read(self, index: int) -> dict[str, Any]:
        """Parse row `index`."""
        return parse_row(self.raw(index), str(self.place(index)))

    def raw(self, index: int) -> bytes:
        """The row's text."""
        start, size = int(self._starts[index]), int(self._ends[index] - self._starts[index])
        if size > MAX_ROW_BYTES:
            raise DataError(f"the row has {size} bytes, more than {MAX_ROW_BYTES}", where=str(self.place(index)))
        return os.pread(self._descriptor(), size, start)

    def _descriptor(self) -> int:
        if self._file is None or self._file[0] != os.getpid():
            self._file = (os.getpid(), os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)))
        return self._file[1]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None}


Spans = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Byte start, byte end and number of each row."""


def _line_spans(data: mmap.mmap, start: int, path: Path) -> Spans:
    """Spans of the lines that are not blank."""
    breaks = _newlines(data, start)
    starts = np.concatenate([[start], breaks + 1])
    ends = np.concatenate([breaks, [len(data)]])
    lines = np.arange(1, len(starts) + 1)
    short = ends - starts < 8  # only these can be blank in a sane file; longer blank lines fail to parse, by number
    keep = np.ones(len(starts), dtype=bool)
    for i in np.flatnonzero(short):
        keep[i] = bool(data[int(starts[i]) : int(ends[i])].strip(_SPACE))
    starts, ends, lines = starts[keep], ends[keep], lines[keep]
    if len(starts) and path.suffix == ".json":
        _check_object_per_line(data[int(starts[0]) : int(ends[0])], path)
    return starts, ends, lines


def _newlines(data: mmap.mmap, start: int) -> np.ndarray:
    """Offsets of the line breaks at or after `start`."""
    found = [np.zeros(0, dtype=np.int64)]
    for begin in range(start, len(data), _SCAN_BYTES):
        block = np.frombuffer(data[begin : begin + _SCAN_BYTES], dtype=np.uint8)
        found.append(np.flatnonzero(block == ord("\n")) + begin)
    return np.concatenate(found)


def _check_object_per_line(first: bytes, path: Path) -> None:
    if first.lstrip()[:1] != b"{" or not first.rstrip().endswith(b"}"):
        raise DataError(
            "the file holds neither a list of objects nor an object per line",
            where=f"{path.name}:1",
            way_out="Write a JSON list, or one object per line.",
        )


def _list_spans(data: bytes, start: int, path: Path) -> Spans:
    """Spans of the elements of a JSON list: the file is parsed once, and only the spans are kept."""
    try:
        text = data[start:].decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"byte {start + error.start} is not UTF-8", where=str(path)) from error
    decoder, spans = json.JSONDecoder(), list[tuple[int, int]]()
    space = re.compile(r"[ \t\r\n]*")
    position = space.match(text, text.index("[") + 1).end()  # type: ignore[union-attr]
    byte, counted = start + position if text.isascii() else start + len(text[:position].encode()), position
    while text[position : position + 1] != "]":
        try:
            _, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise _broken_list(len(spans) + 1, error, path) from error
        byte += len(text[counted:position].encode())
        size = len(text[position:end].encode())
        spans.append((byte, byte + size))
        byte, counted = byte + size, end
        position = space.match(text, end).end()  # type: ignore[union-attr]
        if text[position : position + 1] == ",":
            position = space.match(text, position + 1).end()  # type: ignore[union-attr]
        elif text[position : position + 1] != "]":
            raise _broken_list(len(spans) + 1, ValueError("expected ',' or ']'"), path)
    pairs = np.array(spans, dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1], np.arange(1, len(pairs) + 1)


def _broken_list(row: int, error: Exception, path: Path) -> DataError:
    return DataError(
        f"the JSON list breaks off: {_reason(error)}",
        where=f"{path.name}:{row}",
        way_out="Repair the file; one object per line (.jsonl) survives a cut file.",
    )


def parse_row(data: bytes, where: str) -> dict[str, Any]:
    """One JSON object, strictly: no NaN, no duplicate keys, no lone surrogates.

    Raises:
        DataError: Naming the byte or the fault.
    """
    try:
        text = data.decode("utf-8")
        row = _DECODER.decode(text)
    except UnicodeDecodeError as error:
        raise DataError(
            f"byte {error.start} of the row is not UTF-8 (0x{data[error.start]:02x})", where=where
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"broken JSON: {_reason(error)}", where=where) from error
    if not isinstance(row, dict):
        raise DataError(f"the row is a {type(row).__name__}, not an object", where=where)
    if b"\\u" in data and _has_lone_surrogate(row):
        raise DataError("the row holds a lone surrogate (half a character)", where=where)
    return row


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _has_lone_surrogate(row: dict[str, Any]) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate key '{next(n for n in names if names.count(n) > 1)}'")
    return row


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)


class CsvReader:
    """Rows of a CSV file as `{column: text}`; the file is held in memory."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path, self.name = path, name or path.name
        csv.field_size_limit(MAX_ROW_BYTES)
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                table = csv.DictReader(file, strict=True)
                self._table = list(table)
                self.columns = dict.fromkeys(table.fieldnames or (), "text")
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"cannot be read as CSV: {error}", where=str(path)) from error
        if not self._table:
            raise DataError("the file holds no rows", where=str(path))

    def __len__(self) -> int:
        return len(self._table)

    def place(self, index: int) -> Place:
        """Number of the row, the header not counted."""
        return Place(self.name, index + 1)

    def read(self, index: int) -> dict[str, Any]:
        """Row `index`; empty cells are left out.

        Raises:
            DataError: It has more or fewer cells than the header.
        """
        cells = self._table[index]
        if None in cells or None in cells.values():
            raise DataError(
                f"the row does not have the header's {len(self.columns)} cells", where=str(self.place(index))
            )
        return {name: value for name, value in cells.items() if name and value != ""}

    def raw(self, index: int) -> bytes:
        """The row's cells."""
        return _as_bytes(self._table[index])


class ParquetReader:
    """Rows of a parquet file, through the memory-mapped Arrow copy that `datasets` keeps."""

    def __init__(self, path: Path, cache_dir: str | None = None, name: str | None = None) -> None:
        self.path, self.name, self._cache_dir = path, name or path.name, cache_dir
        self._table = self._open()
        if not len(self):
            raise DataError("the file holds no rows", where=str(path))

    def _open(self) -> Any:
        import datasets  # heavy, and only parquet needs it
        import pyarrow as pa
        import pyarrow.parquet as pq

        datasets.disable_progress_bars()
        try:
            pq.read_schema(self.path)  # a cut file has no footer: said here, before anything is written
            return datasets.Dataset.from_parquet(str(self.path), cache_dir=self._cache_dir).data
        except (pa.ArrowException, OSError, datasets.exceptions.DatasetsError) as error:
            raise DataError(f"cannot be read as parquet: {error}", where=str(self.path)) from error

    def __len__(self) -> int:
        return self._table.num_rows

    @property
    def columns(self) -> dict[str, str]:
        """Column → type; the two widths of Arrow's texts and lists are one."""
        return {field.name: str(field.type).replace("large_", "") for field in self._table.schema}

    def is_null(self, column: str) -> bool:
        """Whether a column has no value in any row."""
        return self._table.column(column).null_count == len(self)

    def place(self, index: int) -> Place:
        """Number of the row."""
        return Place(self.name, index + 1)

    def read(self, index: int) -> dict[str, Any]:
        """Row `index`, as Python objects."""
        return self._table.fast_slice(index, 1).to_pylist()[0]

    def raw(self, index: int) -> bytes:
        """The row's values."""
        return _as_bytes(self.read(index))


def _as_bytes(row: dict[str, Any]) -> bytes:
    """A row of a table in one spelling; bytes in it by their hash."""

    def plain(value: Any) -> str:
        return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else repr(value)

    return json.dumps(row, ensure_ascii=False, default=plain).encode("utf-8", "surrogatepass")
