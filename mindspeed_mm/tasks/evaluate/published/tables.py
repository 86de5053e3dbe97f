"""Tables of published sets: their texts are in memory, their media are read from the file when they are due."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.rows.readers import RowReader, open_reader

_MOST_CELL_BYTES = 1 << 30
_COPY_AGAIN = "Copy it again from where it is published."

Row = dict[str, Any]
"""Cells of a row by their columns, without pictures and empty ones."""


class SetTable(Protocol):
    """Rows of one file, or of several in turn."""

    rows: list[Row]
    """Without media; empty cells are left out."""

    def media(self, index: int, column: str) -> Any:
        """A cell that holds media, read from the file; None where it is empty."""

    def where(self, index: int) -> str:
        """Where a row stands, for messages."""


class TsvTable:
    """A file of tab-separated columns, as VLMEvalKit publishes sets: pictures are base64 text in a cell."""

    def __init__(self, path: Path, heavy: Iterable[str]) -> None:
        self._path, self._heavy = path, frozenset(heavy)
        csv.field_size_limit(_MOST_CELL_BYTES)
        self.rows: list[Row] = []
        self._offsets: list[int] = []
        with path.open("rb") as file:
            lines = _Lines(file)
            table = csv.reader(lines, delimiter="\t")
            try:
                self._header = next(table, [])
                position = lines.position
                for cells in table:
                    self._offsets.append(position)
                    self.rows.append({k: v for k, v in self._named(cells).items() if k not in self._heavy and v != ""})
                    position = lines.position
            except (UnicodeDecodeError, csv.Error, ValueError) as error:
                where = f"{path}:{len(self.rows) + 1}"
                raise DataError(
                    f"cannot be read as tab-separated text: {error}", where=where, way_out=_COPY_AGAIN
                ) from error

    def media(self, index: int, column: str) -> Any:
        """The base64 text of a cell."""
        with self._path.open("rb") as file:
            file.seek(self._offsets[index])
            cells = next(csv.reader(_Lines(file), delimiter="\t"))
        return self._named(cells).get(column) or None

    def where(self, index: int) -> str:
        """Return where a row stands, as `file:number` counted from 1, for messages."""
        return f"{self._path}:{index + 1}"

    def _named(self, cells: list[str]) -> dict[str, str]:
        return dict(zip(self._header, cells, strict=True))


class ReaderTable:
    """Parquet, CSV or JSON lines: rows as the training's readers give them."""

    def __init__(self, paths: list[Path], heavy: Iterable[str]) -> None:
        columns = frozenset(heavy)
        self._places: list[tuple[RowReader, int]] = []
        self.rows: list[Row] = []
        for reader in map(open_reader, paths):
            for i in range(len(reader)):
                self._places.append((reader, i))
                row = reader.read(i).items()
                self.rows.append({key: cell for key, cell in row if key not in columns and cell not in (None, "")})

    def media(self, index: int, column: str) -> Any:
        """A picture as its bytes or its path."""
        reader, i = self._places[index]
        return reader.read(i).get(column)

    def where(self, index: int) -> str:
        """Return where a row stands, as the reader of its file names the place, for messages."""
        reader, i = self._places[index]
        return str(reader.place(i))


class _Lines:
    """Lines of a file as text, and where the next begins."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.position = file, file.tell()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._file.readline()
        if not line:
            raise StopIteration
        self.position += len(line)
        return line.decode("utf-8-sig" if self.position == len(line) else "utf-8")
