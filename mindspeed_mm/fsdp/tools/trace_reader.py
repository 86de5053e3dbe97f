"""Reads a Chrome trace event by event, so that a trace of any size costs the memory of what is kept of it.

Takes what torch's profiler writes (an object with `traceEvents`, plain or gzip) and what an NPU's writes (a bare list).
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from mindspeed_mm.core.errors import DataError

CHUNK_CHARACTERS = 1 << 20
MOST_OF_AN_EVENT = 1 << 24
"""Characters: what has no end by then is not an event."""
MOST_OF_A_HEAD = 1 << 25
_LIST = re.compile(r'"traceEvents"\s*:\s*\[')
_GAP = re.compile(r"[\s,]*")
_RANK = re.compile(r'"distributedInfo"\s*:\s*\{.*?"rank"\s*:\s*(\d+)', re.DOTALL)
_PYTHON_CALL = re.compile(r'\{\s*"ph": "X",\s*"cat": "python_function",.*?"args": \{[^{}]*\}\s*\}', re.DOTALL)
"""As torch writes one. There are ten of them to each operator, and the names of functions that are gone by the end of
the recording are whatever lies in their memory by then, quotation marks included."""
_WAY_OUT = "Give a trace that torch's profiler or an NPU's wrote (*.json or *.json.gz), or the folder of one."


@dataclass
class TraceFile:
    """One trace on disk.

    Args:
        path: A `.json`, or a `.json.gz`; what it is, is seen in its first bytes.
    """

    path: Path
    rank: int | None = None
    """Rank of the process that wrote the file, where the trace says so; known once events are read."""
    _buffer: str = field(default="", repr=False)
    _at: int = field(default=0, repr=False)
    _is_read: bool = field(default=False, repr=False)

    def events(self) -> Iterator[dict[str, Any]]:
        """Every event but the calls of Python functions, in the order of the file.

        Raises:
            DataError: The file is not a trace, or is cut short.
        """
        try:
            with self._open() as file:
                yield from self._events(file)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            raise self._cut_short() from None
        except OSError as error:
            raise DataError(f"cannot be read ({error.strerror or error})", where=str(self.path)) from None

    def _open(self) -> IO[str]:
        raw = self.path.open("rb")
        is_gzip = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        content: IO[bytes] = gzip.GzipFile(fileobj=raw) if is_gzip else raw  # type: ignore[assignment]
        return io.TextIOWrapper(content, encoding="utf-8", errors="replace")

    def _events(self, file: IO[str]) -> Iterator[dict[str, Any]]:
        self._find_list(file)
        decode = json.JSONDecoder(strict=False).raw_decode
        while True:
            self._skip_gap(file)
            if self._at >= len(self._buffer):
                raise self._cut_short()
            if self._buffer[self._at] == "]":
                return
            if (call := _PYTHON_CALL.match(self._buffer, self._at)) is not None:
                self._at = call.end()
                continue
            try:
                event, self._at = decode(self._buffer, self._at)
            except ValueError:
                if self._is_read:
                    raise self._cut_short() from None
                if len(self._buffer) - self._at > MOST_OF_AN_EVENT:
                    raise self._foreign("holds something that is not an event") from None
                self._fill(file)
                continue
            if not isinstance(event, dict):
                raise self._foreign(f"holds {str(event)[:40]!r} where an event should be")
            yield event

    def _find_list(self, file: IO[str]) -> None:
        """Go to the first event."""
        self._fill(file)
        text = self._buffer.lstrip("\ufeff \t\r\n")
        if text.startswith("["):
            self._at = self._buffer.index("[") + 1
            return
        if not text.startswith("{"):
            raise self._foreign("is not JSON" if text else "is empty")
        while (found := _LIST.search(self._buffer)) is None:
            if self._is_read or len(self._buffer) > MOST_OF_A_HEAD:
                raise self._foreign("has no list 'traceEvents'")
            self._fill(file)
        rank = _RANK.search(self._buffer, 0, found.start())
        self.rank = int(rank.group(1)) if rank else None
        self._at = found.end()

    def _skip_gap(self, file: IO[str]) -> None:
        while True:
            gap = _GAP.match(self._buffer, self._at)
            self._at = gap.end() if gap else self._at
            if self._at < len(self._buffer) or self._is_read:
                return
            self._fill(file)

    def _fill(self, file: IO[str]) -> None:
        """Read more behind what is not used yet."""
        more = file.read(CHUNK_CHARACTERS)
        self._is_read = not more
        self._buffer = self._buffer[self._at :] + more
        self._at = 0

    def _cut_short(self) -> DataError:
        return DataError(
            "is cut short: the process that wrote it ended too early, or the disk was full",
            where=str(self.path),
            way_out="Record it again.",
        )

    def _foreign(self, what: str) -> DataError:
        return DataError(f"{what}: this is not a trace", where=str(self.path), way_out=_WAY_OUT)
