"""A trace as columns of numbers: what its analysis needs of every event, and nothing else.

It is read event by event, so that a trace of any size costs the memory of what is kept of it: what torch's profiler
writes (an object with `traceEvents`, plain or gzip) and what an NPU's writes (a bare list).
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonObject

# --- columns ----------------------------------------------------------------------------------------------------------


MICROSECOND = 1e-6


class Kind(IntEnum):
    """Kind of an event in a trace: where it ran, and what it did."""

    OTHER = 0
    OPERATOR = 1
    """On the host: an operator, or what autograd puts around one."""
    RANGE = 2
    """On the host: a named stretch."""
    COMPUTE = 3
    """On a device: a kernel, a copy within the device, a memset."""
    COMMUNICATION = 4
    """On a device: a collective; on the host: what carries one out."""
    TO_DEVICE = 5
    FROM_DEVICE = 6


_CATEGORIES = {
    "cpu_op": Kind.OPERATOR,
    "operator": Kind.OPERATOR,
    "user_annotation": Kind.RANGE,
    "kernel": Kind.COMPUTE,
    "gpu_memset": Kind.COMPUTE,
    "gpu_memcpy": Kind.COMPUTE,
}
_NPU_PROCESSES = {"python": Kind.OPERATOR, "ascend hardware": Kind.COMPUTE, "communication": Kind.COMMUNICATION}
_NPU_PROCESSES |= {"hccl": Kind.COMMUNICATION}
"""Processes of an NPU's trace, which has no categories; those not listed repeat or only describe what these hold."""
_COLLECTIVE_KERNEL = re.compile(r"nccl|rccl|mccl|hccl|hcom_|xccl|oneccl|all_?reduce|all_?gather|reduce_?scatter", re.I)
_COLLECTIVE_ON_HOST = re.compile(r"(gloo|mpi|ucc|nccl|hccl|xccl):|c10d::|_c10d_functional::|record_param_comms")
_WAITING_TASK = re.compile(r"^(event_|notify_|wait)", re.I)
"""Tasks in a stream of an NPU that only wait for another one."""


@dataclass
class TraceColumns:
    """One file's events that last, in the order of the file. Times are in seconds."""

    path: Path
    rank: int | None = None
    names: list[str] = field(default_factory=list)
    lanes: list[tuple[str, str]] = field(default_factory=list)
    """(process, thread) of the lane of each number."""
    begin: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    end: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    kind: NDArray[np.int8] = field(default_factory=lambda: np.empty(0, np.int8))
    name: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    lane: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    external: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Links what runs on a device to the operator on the host; -1: to none."""
    sequence: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Links an operator's backward pass to its forward pass; -1: to none."""

    @property
    def has_device(self) -> bool:
        """Whether work of an accelerator is in the trace; otherwise the host's operators are the work."""
        return bool(np.any(self.kind == Kind.COMPUTE))


class _Numbers:
    """Words and the numbers they got."""

    def __init__(self) -> None:
        self.of: dict[Any, int] = {}

    def __call__(self, word: object) -> int:
        return self.of.setdefault(word, len(self.of))


class _Reading:
    """What is kept of the events while they go by."""

    def __init__(self) -> None:
        self.begin, self.length = array("d"), array("d")
        self.kind, self.name, self.lane = array("b"), array("l"), array("l")
        self.external, self.sequence = array("q"), array("q")
        self.names, self.lanes = _Numbers(), _Numbers()
        self.processes: dict[str, str] = {}

    def take(self, event: JsonObject) -> None:
        """Keep an event, if it matters."""
        phase, category = event.get("ph"), event.get("cat")
        if phase == "M":
            if event.get("name") == "process_name":
                self.processes[str(event.get("pid"))] = str(event.get("args", {}).get("name", ""))
            return
        if phase != "X" or (category is not None and category not in _CATEGORIES):
            return
        name = str(event.get("name", ""))
        kind = _kind(name, category)
        details = event.get("args")
        details = details if isinstance(details, dict) else {}
        self.begin.append(float(event["ts"]))
        self.length.append(float(event.get("dur", 0)))
        self.kind.append(kind)
        self.name.append(self.names(name))
        self.lane.append(self.lanes((str(event.get("pid")), str(event.get("tid")))))
        self.external.append(_number(details, "External id", "external id"))
        self.sequence.append(_number(details, "Sequence number"))


def _kind(name: str, category: str | None) -> Kind:
    if category is None:
        return Kind.OTHER  # its process says what it is, once all names of processes are known
    kind = _CATEGORIES[category]
    if category == "gpu_memcpy":
        if "HtoD" in name:
            return Kind.TO_DEVICE
        if "DtoH" in name:
            return Kind.FROM_DEVICE
        return kind
    if kind == Kind.COMPUTE and _COLLECTIVE_KERNEL.search(name):
        return Kind.COMMUNICATION
    if kind in (Kind.OPERATOR, Kind.RANGE) and _COLLECTIVE_ON_HOST.match(name):
        return Kind.COMMUNICATION
    return kind


def _number(details: Mapping[str, object], *keys: str) -> int:
    for key in keys:
        value = details.get(key)
        if isinstance(value, int):
            return value
    return -1


def read_columns(path: Path) -> TraceColumns:
    """Read one trace.

    Raises:
        DataError: It is not a trace, or is cut short, or nothing of it can be analysed.
    """
    file, reading = TraceFile(path), _Reading()
    for event in file.events():
        try:
            reading.take(event)
        except (KeyError, TypeError, ValueError):
            raise DataError(
                f"holds an event without a time: {str(event)[:60]}", where=str(path), way_out="Record it again."
            ) from None
    begin = np.frombuffer(reading.begin, dtype=np.float64) * MICROSECOND
    columns = TraceColumns(
        path=path,
        rank=file.rank if file.rank is not None else _rank_in(path.name),
        names=list(reading.names.of),
        lanes=list(reading.lanes.of),
        begin=begin,
        end=begin + np.frombuffer(reading.length, dtype=np.float64) * MICROSECOND,
        kind=np.array(reading.kind, dtype=np.int8),
        name=np.array(reading.name, dtype=np.int32),
        lane=np.array(reading.lane, dtype=np.int32),
        external=np.array(reading.external, dtype=np.int64),
        sequence=np.array(reading.sequence, dtype=np.int64),
    )
    _settle_processes(columns, reading.processes)
    if not np.any(columns.kind != Kind.OTHER):
        raise DataError(
            "holds no operators, kernels or named ranges",
            where=str(path),
            way_out="Give a trace that torch's profiler or an NPU's wrote.",
        )
    return columns


def _settle_processes(columns: TraceColumns, processes: dict[str, str]) -> None:
    """Events without a category, those of NPUs: by the process that they stand under."""
    of_lane = np.array([_NPU_PROCESSES.get(processes.get(pid, "").lower(), Kind.OTHER) for pid, _ in columns.lanes])
    unknown = np.flatnonzero(columns.kind == Kind.OTHER)
    if not len(unknown) or not len(of_lane):
        return
    columns.kind[unknown] = of_lane[columns.lane[unknown]]
    of_name = np.array([_npu_kind(name) for name in columns.names])
    on_device = unknown[columns.kind[unknown] == Kind.COMPUTE]
    columns.kind[on_device] = of_name[columns.name[on_device]]
    is_range = np.array([name.startswith("mm.") for name in columns.names])
    on_host = unknown[columns.kind[unknown] == Kind.OPERATOR]
    columns.kind[on_host[is_range[columns.name[on_host]]]] = Kind.RANGE


def _npu_kind(name: str) -> Kind:
    if _WAITING_TASK.search(name):
        return Kind.OTHER
    lowered = name.lower()
    if "memcpy" in lowered:
        if "d2h" in lowered or "device_to_host" in lowered:
            return Kind.FROM_DEVICE
        if "h2d" in lowered:
            return Kind.TO_DEVICE
        return Kind.COMPUTE
    if _COLLECTIVE_KERNEL.search(name):
        return Kind.COMMUNICATION
    return Kind.COMPUTE


def _rank_in(name: str) -> int | None:
    found = re.search(r"rank[_-]?(\d+)", name)
    if found:
        return int(found.group(1))
    return None


# --- reading a file event by event ------------------------------------------------------------------------------------


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

    def events(self) -> Iterator[JsonObject]:
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

    def _events(self, file: IO[str]) -> Iterator[JsonObject]:
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
