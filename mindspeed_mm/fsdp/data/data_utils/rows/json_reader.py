"""Rows of JSON files: a list of objects, or an object per line.

Only the byte span of each row is kept (24 bytes a row); a row is parsed when it is asked for.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonObject, fraction, whole_number
from mindspeed_mm.core.whole_text import HALF_CHARACTER, has_lone_surrogate
from mindspeed_mm.fsdp.data.data_utils.sample import REPAIR, RowLocation

MAX_ROW_BYTES = 64 * 2**20
_BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
_BLOCK_BYTES = 8 * 2**20
_HEAD_BYTES = 2**16
_BLANK_BYTES = 8
"""Shorter lines may be blank; longer blank ones fail to parse, by number."""


class _Spans:
    """Byte start, byte end and number (of the line, or in the list) of each row."""

    def __init__(self) -> None:
        self.starts, self.ends, self.numbers = array("q"), array("q"), array("q")

    def clear(self) -> None:
        for column in (self.starts, self.ends, self.numbers):
            del column[:]

    def append(self, starts: np.ndarray, ends: np.ndarray, numbers: np.ndarray) -> None:
        for column, values in ((self.starts, starts), (self.ends, ends), (self.numbers, numbers)):
            column.frombytes(np.ascontiguousarray(values, dtype=np.int64).tobytes())


class JsonRows:
    """Rows at known spans of a file.

    Args:
        path: The file.
        name: What to call it; None: by its name.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path, self.name = path, name or path.name
        self._spans = _Spans()
        self._file: tuple[int, int] | None = None  # (process id, descriptor): every worker opens its own

    def place(self, index: int) -> RowLocation:
        """Line (or number, in a list) of the row."""
        return RowLocation(self.name, self._spans.numbers[index])

    def read(self, index: int) -> JsonObject:
        """Parse row `index`. Raises `DataError` for one that is too large or is not a valid JSON object."""
        return parse_row(self._text(index), str(self.place(index)))

    def _text(self, index: int) -> bytes:
        start, size = self._spans.starts[index], self._spans.ends[index] - self._spans.starts[index]
        check_row_bytes(size, self.place(index))
        return os.pread(self._descriptor(), size, start).strip(_SPACE)

    def _descriptor(self) -> int:
        if self._file is None or self._file[0] != os.getpid():
            self._file = (os.getpid(), os.open(self.path, os.O_RDONLY))
        return self._file[1]

    def __getstate__(self) -> JsonObject:
        return self.__dict__ | {"_file": None}


def check_row_bytes(size: int, place: RowLocation) -> None:
    """Raise `DataError` when a row is too large to be read."""
    if size > MAX_ROW_BYTES:
        what = f"the row has {size} bytes, more than {MAX_ROW_BYTES}"
        raise DataError(what, where=str(place), way_out="Keep media in files and name their paths.")


class JsonReader(JsonRows):
    """A list of objects, or an object per line, whichever the file holds.

    Raises:
        DataError: The file as a whole is neither.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        super().__init__(path, name)
        start, is_list = how_it_starts(path)
        if is_list:
            _ListScan(path, start, self._spans)
            return
        lines = _LineScan(path, start, self._spans)
        while not lines.is_done:
            lines.grow()
        if path.suffix == ".json" and len(self):
            _check_object_per_line(self._text(0), path)

    def __len__(self) -> int:
        return len(self._spans.starts)


class LineStream(JsonRows):
    """An object per line, found while rows are asked for: nothing is read before."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        super().__init__(path, name)
        self._lines = _LineScan(path, how_it_starts(path)[0], self._spans)

    def has(self, index: int) -> bool:
        """Whether there is a row `index`; reads on until it is found or the file has ended."""
        while len(self._spans.starts) <= index and not self._lines.is_done:
            self._lines.grow()
        return index < len(self._spans.starts)


def how_it_starts(path: Path) -> tuple[int, bool]:
    """Where the text begins (after a byte-order mark), and whether it is a list."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    start = len(_BOM) if head.startswith(_BOM) else 0
    return start, head[start:].lstrip(_SPACE)[:1] == b"["


class _LineScan:
    """Finds the lines of a file that are not blank, block by block.

    Args:
        path: The file.
        start: Byte at which the first line starts.
        spans: Where found rows go.
    """

    def __init__(self, path: Path, start: int, spans: _Spans) -> None:
        self._path, self._spans = path, spans
        self._line_start, self._read_to, self._lines = start, start, 0
        self.is_done = False

    def grow(self) -> None:
        """Look through one more block."""
        with self._path.open("rb", buffering=0) as file:
            block = os.pread(file.fileno(), _BLOCK_BYTES, self._read_to)
            breaks = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n")) + self._read_to
            self._read_to += len(block)
            if not block:
                self.is_done = True
                breaks = np.array([self._read_to] if self._line_start < self._read_to else [], dtype=np.int64)
            if len(breaks):
                self._add(file.fileno(), breaks)

    def _add(self, descriptor: int, breaks: np.ndarray) -> None:
        """The lines that end at the breaks."""
        starts = np.concatenate([[self._line_start], breaks[:-1] + 1])
        numbers = np.arange(len(breaks)) + self._lines + 1
        keep = np.ones(len(breaks), dtype=bool)
        for i in np.flatnonzero(breaks - starts < _BLANK_BYTES):
            keep[i] = bool(os.pread(descriptor, int(breaks[i] - starts[i]), int(starts[i])).strip(_SPACE))
        self._spans.append(starts[keep], breaks[keep], numbers[keep])
        self._line_start, self._lines = int(breaks[-1]) + 1, self._lines + len(breaks)


def _check_object_per_line(first: bytes, path: Path) -> None:
    if first.lstrip()[:1] != b"{" or not first.rstrip().endswith(b"}"):
        raise DataError(
            "the file holds neither a list of objects nor an object per line",
            where=f"{path.name}:1",
            way_out="Write a JSON list, or one object per line.",
        )


class _ListScan:
    """Finds the elements of a JSON list, block by block, without parsing them: only quotes, brackets, commas and
    backslashes are looked at.

    Args:
        path: The file.
        start: Byte at which the text begins.
        spans: Where found elements go.

    Raises:
        DataError: The list is not closed, or something follows it.
    """

    def __init__(self, path: Path, start: int, spans: _Spans) -> None:
        self._path, self._spans = path, spans
        self._depth, self._is_in_text, self._element_start, self._end = 0, False, 0, -1
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            begin = start
            while begin < len(data) and self._end < 0:
                end = min(begin + _BLOCK_BYTES, len(data))
                while end < len(data) and data[end - 1] == ord("\\"):
                    end += 1  # what a backslash escapes stands in the same block
                self._look_at(np.frombuffer(data[begin:end], dtype=np.uint8), begin)
                begin = end
            if self._end < 0:
                raise _broken_list(len(spans.starts) + 1, "the file ends before its ']'", path)
            if not data[self._spans.starts[-1] : self._end].strip(_SPACE) and len(spans.starts) == 1:
                spans.clear()  # []
            rest = data[self._end + 1 :].strip(_SPACE)
            if rest:
                raise _broken_list(len(spans.starts), f"{rest[:20]!r} comes after its ']'", path)

    def _look_at(self, block: np.ndarray, offset: int) -> None:
        """Find the elements that end in a block, which begins `offset` bytes into the file."""
        # Everything below is told by the few bytes that are marks: where they stand, and which they are.
        at = np.flatnonzero(_MARKS[block])
        if not len(at):
            return
        marks = block[at]
        # A mark is inside a string where the quotes so far are odd in number, those of earlier blocks counted in.
        is_quote = (marks == ord('"')) & ~_escaped(at, marks)
        in_text = (np.cumsum(is_quote) + self._is_in_text) % 2 == 1
        # Outside of strings each bracket changes the depth by one; `depth` is that behind each mark.
        step = np.where(in_text, 0, _STEPS[marks])
        depth = np.cumsum(step) + self._depth
        # The first bracket that brings the depth back to 0 ends the list: what follows it is not an element.
        closed = np.flatnonzero((depth == 0) & (step < 0))[:1]
        is_comma = (marks == ord(",")) & ~in_text & (depth == 1)
        if len(closed):
            is_comma[closed[0] :] = False
        if self._depth == 0:
            self._element_start = int(at[0]) + offset + 1  # the first mark of all opens the list
        # An element ends at a comma of the list itself or at its end, and the next one starts right behind.
        ends = np.append(at[is_comma], at[closed]) + offset
        if len(ends):
            first = len(self._spans.starts) + 1
            starts = np.concatenate([[self._element_start], ends[:-1] + 1])
            self._spans.append(starts, ends, np.arange(first, first + len(ends)))
            self._element_start = int(ends[-1]) + 1
        if len(closed):
            self._end = int(ends[-1])
        self._depth, self._is_in_text = int(depth[-1]), bool(in_text[-1])


def _escaped(at: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """Which of the marks stand after an odd number of backslashes: backslashes escape one another in pairs."""
    is_backslash = marks == ord("\\")
    touches = np.zeros(len(at), dtype=bool)  # a backslash comes right before
    touches[1:] = is_backslash[:-1] & (np.diff(at) == 1)
    # Backslashes are marks themselves, so those in a row have numbers in a row. A mark that none touches starts a run;
    # the running maximum hands the number of its start on to all of the run.
    numbers = np.arange(len(at))
    run_start = np.maximum.accumulate(np.where(touches, 0, numbers))
    return (numbers - run_start) % 2 == 1


def _table(values: dict[str, int]) -> np.ndarray:
    table = np.zeros(256, dtype=np.int8)
    for character, value in values.items():
        table[ord(character)] = value
    return table


_STEPS = _table({"[": 1, "{": 1, "]": -1, "}": -1})
_MARKS = _table(dict.fromkeys('"\\,[]{}', 1)) > 0


def _broken_list(row: int, reason: str, path: Path) -> DataError:
    return DataError(
        f"the JSON list breaks off: {reason}",
        where=f"{path.name}:{row}",
        way_out="Repair the file; one object per line (.jsonl) survives a cut file.",
    )


def parse_row(data: bytes, where: str) -> JsonObject:
    """One JSON object, strictly: no duplicate keys, no lone surrogates. NaN and infinity, which pandas and Python's own
    `json` write, are numbers that no column that is read takes.

    Raises:
        DataError: Naming the byte or the fault.
    """
    try:
        text = data.decode("utf-8")
        row = _DECODER.decode(text)
    except UnicodeDecodeError as error:
        raise DataError(
            f"byte {error.start} of the row is not UTF-8 (0x{data[error.start]:02x})", where=where, way_out=REPAIR
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"broken JSON: {_reason(error)}", where=where, way_out=REPAIR) from error
    if not isinstance(row, dict):
        raise DataError(f"the row is {_KINDS[type(row)]}, not an object", where=where, way_out=REPAIR)
    if b"\\u" in data and has_lone_surrogate(row):
        found = _LONE_SURROGATE.search(data)
        at = f"byte {found.start()} of the row begins" if found else "the row holds"
        raise DataError(f"{at} {HALF_CHARACTER}", where=where, way_out=REPAIR)
    return row


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return str(error)


_LONE_SURROGATE = re.compile(rb"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..\\u[dD])[c-fC-F]..)")
"""The first half of a pair without the second, or the second without the first."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> JsonObject:
    row = dict(pairs)
    if len(row) != len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"duplicate key '{name}'")
    return row


_KINDS = {list: "a list", str: "a text", int: "a number", float: "a number", bool: "true or false", type(None): "null"}
_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_int=whole_number, parse_float=fraction)
