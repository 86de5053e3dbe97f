"""A file of records: `segment-*.mmc`. It appears under its name whole or not at all, and nothing in it ever changes.

    magic (8 bytes) · records, each of whole multiples of 8 bytes · index (one `ENTRY` a record) · footer

The footer says where the index starts and what its checksum is; each entry has the checksum of its record.
"""

from __future__ import annotations

import hashlib
import os
import struct
import uuid
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mindspeed_mm.core.artifacts import atomic_file
from mindspeed_mm.core.errors import DataError

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
        footer = _FOOTER.pack(self.bytes, len(self._entries), _checksum(index), _MAGIC)
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
        start, count, told, _ = _FOOTER.unpack(tail)
        if start + count * ENTRY.itemsize + _FOOTER.size != size:
            raise DamagedSegment(f"has {size} bytes, which differs from its index", where=str(path))
        file.seek(start)
        index = file.read(count * ENTRY.itemsize)
    if _checksum(index) != told:
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


def _checksum(index: bytes) -> bytes:
    return hashlib.blake2b(index, digest_size=16).digest()
