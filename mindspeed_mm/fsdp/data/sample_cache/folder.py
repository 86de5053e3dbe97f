"""The folder of one set of settings: its segments, who may write to it, and which record belongs to which row.

A segment is a file of records, `segment-*.mmc`. It appears under its name whole or not at all, and nothing in it ever
changes.

    magic (8 bytes) · records, each of whole multiples of 8 bytes · index (one `ENTRY` a record) · footer

The footer says where the index starts and what its checksum is; each entry has the checksum of its record.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import struct
import time
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindspeed_mm.core.artifacts import atomic_file, atomic_write_bytes, atomic_write_text, make_writable_folder
from mindspeed_mm.core.errors import DataError, MachineError
from mindspeed_mm.fsdp.data.sample_cache.identity import digest_of
from mindspeed_mm.fsdp.params.rules.path import check_writable

CACHE_KEY = "data.dataset_param.basic_parameters.cache_dir"
_LOOK_EVERY_S = 0.2
_TELL_EVERY_S = 30.0
_OLD_TABLE_S = 3600.0
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Table:
    """For each row of a data set, where its record is."""

    segments: list[str]
    """Names of files."""
    segment: np.ndarray
    """(rows,) number of the file; -1: there is no record."""
    entries: np.ndarray
    """(rows,) of `ENTRY`."""

    @property
    def is_missing(self) -> np.ndarray:
        """(rows,) whether nothing is known of a row."""
        return self.segment < 0

    @property
    def is_usable(self) -> np.ndarray:
        """(rows,) whether there is a record with a sample; others are known to be too long, or not known."""
        return (self.segment >= 0) & (self.entries["size"] > 0)


class CacheFolder:
    """Segments of one set of settings.

    Args:
        root: Of all settings.
        settings: See `identity.settings_of`.
    """

    def __init__(self, root: Path, settings: Mapping[str, object]) -> None:
        self.path = root / digest_of(settings)
        self._settings = settings

    def prepare(self) -> None:
        """Make it.

        Raises:
            ConfigError: It lies below a file.
            MachineError: It cannot be written.
        """
        check_writable(self.path, CACHE_KEY)
        try:
            make_writable_folder(self.path)
        except MachineError as error:
            problem = error.problems[0]
            raise MachineError(
                problem.what, where=problem.where, key=CACHE_KEY, way_out="Set it to a folder with room."
            ) from error
        # No `.json`: a folder of rows may be what the cache stands in, and every .json in it is taken for rows.
        if not (self.path / "settings.txt").exists():
            atomic_write_text(
                self.path / "settings.txt", json.dumps(self._settings, indent=1, ensure_ascii=False) + "\n"
            )

    def clear(self, older_than_s: float = 0.0) -> None:
        """Take away the records, and what a kill left.

        Args:
            older_than_s: By the clock of the file system: what is younger stays.
        """
        (self.path / ".lock").touch()
        # A file written now gives the file server's clock, which may differ from this host's.
        now = (self.path / ".lock").stat().st_mtime
        for path in (*self.segments(), *self.path.glob("rows-*"), *self.path.glob(".*.tmp")):
            if now - path.stat().st_mtime >= older_than_s:
                path.unlink(missing_ok=True)

    def segments(self) -> list[Path]:
        """In the order in which they were written, as far as the file system tells."""
        found = list(self.path.glob(f"segment-*{SUFFIX}"))
        return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))

    def size_bytes(self) -> int:
        """Return the size of all segments on the disk together, in bytes."""
        return sum(path.stat().st_size for path in self.segments())

    @contextmanager
    def held(self, tell: Callable[[str], None]) -> Iterator[None]:
        """One process at a time; the others wait here, in no collective, however long it takes.

        Where a file system knows no locks, several write at once: they then do the same work twice, and no harm.
        """
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            told = time.monotonic()
            while _is_taken(descriptor):
                if time.monotonic() - told >= _TELL_EVERY_S:
                    told = time.monotonic()
                    tell(f"waiting for another process that encodes samples into {self.path}")
                time.sleep(_LOOK_EVERY_S)
            yield
        finally:
            # Closing releases the lock; so does a kill, so no stale lock is ever left.
            os.close(descriptor)

    def look_up(self, keys: np.ndarray) -> Table:
        """Find the records of rows.

        Args:
            keys: (rows,) S16.
        """
        # The number of a segment is its place among the readable ones: `names` and `numbers` grow together.
        names: list[str] = []
        numbers, parts = [], []
        for path in self.segments():
            try:
                parts.append(read_entries(path))
            except DamagedSegment as error:
                warnings.warn(f"{error}: its samples are encoded again", stacklevel=2)
                path.unlink(missing_ok=True)
                continue
            numbers.append(np.full(len(parts[-1]), len(names), dtype=np.int32))
            names.append(path.name)
        known = np.concatenate([np.zeros(0, ENTRY), *parts])
        segment = np.concatenate([np.zeros(0, np.int32), *numbers])
        entries, found = np.zeros(len(keys), ENTRY), np.full(len(keys), -1, dtype=np.int32)
        if len(known):
            order = np.argsort(known["key"], kind="stable")
            # The last of equal keys: a record that was written again stands behind the one that was found damaged.
            at = order[np.maximum(np.searchsorted(known["key"], keys, side="right", sorter=order) - 1, 0)]
            is_known = known["key"][at] == keys
            entries[is_known], found[is_known] = known[at[is_known]], segment[at[is_known]]
        return Table(names, found, entries)

    # --- the table of a data set, for the processes that waited while it was made -------------------------------------

    def save_table(self, rows: str, table: Table) -> None:
        """Keep the table of the rows named `rows`, for those that wait for it; an older one is not waited for."""
        content = io.BytesIO()
        np.savez(content, segments=np.array(table.segments), segment=table.segment, entries=table.entries)
        content_bytes = content.getvalue()
        atomic_write_bytes(self._table(rows), _digest(content_bytes) + content_bytes)
        now = self._table(rows).stat().st_mtime
        for path in self.path.glob("rows-*"):
            if now - path.stat().st_mtime > _OLD_TABLE_S:
                path.unlink(missing_ok=True)

    def table_mark(self, rows: str) -> tuple[int, int] | None:
        """Tells whether a table was written since it was last asked for; None where there is none."""
        try:
            status = self._table(rows).stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def load_table(self, rows: str) -> Table | None:
        """The table, if it is there and whole."""
        try:
            content = self._table(rows).read_bytes()
        except OSError:
            return None
        # Damaged tables are made again, never repaired: the segments hold everything.
        if _digest(content[_DIGEST_BYTES:]) != content[:_DIGEST_BYTES]:
            return None
        with np.load(io.BytesIO(content[_DIGEST_BYTES:]), allow_pickle=False) as parts:
            return Table(parts["segments"].tolist(), parts["segment"], parts["entries"])

    def _table(self, rows: str) -> Path:
        return self.path / f"rows-{rows}.table"


def _is_taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks here
        return False
    return False


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


# --- segments ---------------------------------------------------------------------------------------------------------


SUFFIX = ".mmc"
_MAGIC = b"mmcache1"
_FOOTER = struct.Struct("<QQ16s8s")
"""First byte of the index, its entries, BLAKE2b of its bytes, magic."""

ENTRY = np.dtype(
    [
        ("key", "S16"),
        ("start", "<u8"),
        ("size", "<u4"),
        ("crc", "<u4"),
        ("tokens", "<u4"),
        ("patches", "<u4"),
    ]
)
"""A record: what it is of, where it stands, and the size of the sample. Size 0: the sample is too long to be used."""


class DamagedSegment(DataError):
    """A file that is cut, changed, or none of ours."""


class SegmentWriter:
    """Collects records and writes them as one file.

    Args:
        folder: Of the cache.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begin()

    def _begin(self) -> None:
        self._records: list[bytes] = []
        self._entries: list[tuple[bytes, int, int, int, int, int]] = []
        self.bytes = len(_MAGIC)

    def add(self, key: bytes, record: bytes, tokens: int, patches: int) -> None:
        """A record; an empty one says that the sample is too long to be used."""
        self._entries.append((key, self.bytes, len(record), zlib.crc32(record), tokens, patches))
        self._records.append(record)
        self.bytes += len(record)

    def write(self) -> None:
        """Write what was added, forced to the disk, under a name of its own; nothing is written for nothing.

        Raises:
            OSError: The disk is full, or cannot be written.
        """
        if not self._entries:
            return
        index = np.array(self._entries, dtype=ENTRY).tobytes()
        footer = _FOOTER.pack(self.bytes, len(self._entries), _index_checksum(index), _MAGIC)
        path = self._folder / f"segment-{uuid.uuid4().hex}{SUFFIX}"
        with atomic_file(path) as draft, draft.open("wb") as file:
            file.writelines([_MAGIC, *self._records, index, footer])
        self._begin()


def read_entries(path: Path) -> np.ndarray:
    """(records,) of `ENTRY`: what a segment holds.

    Raises:
        DamagedSegment: It is cut, changed, or none of ours.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _FOOTER.size))
        tail = file.read(_FOOTER.size)
        if size < len(_MAGIC) + _FOOTER.size or not tail.endswith(_MAGIC):
            raise DamagedSegment("is cut or no file of samples", where=str(path))
        # A size that does not fit is found before the index is read, so `count` cannot ask for absurd memory.
        start, count, told, _ = _FOOTER.unpack(tail)
        if start + count * ENTRY.itemsize + _FOOTER.size != size:
            raise DamagedSegment(f"has {size} bytes, which differs from its index", where=str(path))
        file.seek(start)
        index = file.read(count * ENTRY.itemsize)
    if _index_checksum(index) != told:
        raise DamagedSegment("its index has changed", where=str(path))
    return np.frombuffer(index, dtype=ENTRY)


class RecordReader:
    """Reads records of many segments. It may be handed to other processes: each opens the files itself.

    Files are read, not mapped: a cut file is then an error with a name instead of a bus error, and the page cache does
    not count as memory of the workers.

    Args:
        paths: The segments, in the order by which records name them.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = [str(path) for path in paths]
        self._open: dict[int, int] = {}
        self._owner = os.getpid()

    def read(self, segment: int, start: int, size: int, crc: int) -> bytearray:
        """The bytes of a record.

        Raises:
            DamagedSegment: They are not what was written.
        """
        record = bytearray(size)
        try:
            count = os.preadv(self._descriptor(segment), [record], start)
        except OSError as error:
            raise DamagedSegment(f"cannot be read: {error.strerror}", where=self._paths[segment]) from error
        if count != size or zlib.crc32(record) != crc:
            raise DamagedSegment(f"the record at byte {start} has changed", where=self._paths[segment])
        return record

    def _descriptor(self, segment: int) -> int:
        if self._owner != os.getpid():  # after a fork: another reader's descriptors are not ours to close
            self._owner, self._open = os.getpid(), {}
        if segment not in self._open:
            if len(self._open) >= _MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[segment] = os.open(self._paths[segment], os.O_RDONLY)
        return self._open[segment]

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_open": {}}


_MOST_OPEN = 128
"""Files that a process holds open."""


def _index_checksum(index: bytes) -> bytes:
    return hashlib.blake2b(index, digest_size=16).digest()
