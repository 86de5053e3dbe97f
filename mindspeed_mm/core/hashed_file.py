"""Files whose bytes are hashed on their way to the disk; whoever reads them compares.

The hash is XXH3 of 128 bits. One core does 25 GB a second, so that neither saving nor verifying waits for it. It tells
damage, not forgery: who can change a file can also change the record that lies beside it.
https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from typing_extensions import Buffer

_NEW = "xxh3_128"
_HASHES: Mapping[str, Callable[[], Any]] = {_NEW: xxhash.xxh3_128, "sha256": hashlib.sha256}
"""By the name that stands before a checksum; SHA-256 is that of older checkpoints."""
_CHECKSUM = re.compile(rf"({'|'.join(_HASHES)}):[0-9a-f]+")


def is_checksum(value: object) -> bool:
    """Whether a value is the checksum of a file, by a hash that is known here."""
    return isinstance(value, str) and _CHECKSUM.fullmatch(value) is not None


@dataclass(frozen=True)
class FileRecord:
    """A file as it was written."""

    size: int
    """Bytes."""
    checksum: str
    """`<hash>:<hexadecimal digits>`."""

    def checksum_now(self, path: Path) -> str:
        """The checksum of a file on the disk, by the hash of this record. Raises `OSError`."""
        name = self.checksum.partition(":")[0]
        with path.open("rb") as file:
            return f"{name}:{hashlib.file_digest(file, _HASHES[name]).hexdigest()}"


class HashedFile(io.BufferedWriter):
    """A new file that is written from beginning to end, hashed on the way, and forced to the disk when it is closed.

    Args:
        path: Of the file; one that is there is emptied.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._hash = _HASHES[_NEW]()
        self._size = 0

    def write(self, data: Buffer, /) -> int:
        """Write all of it, and hash it as it lies in memory: what the disk makes of it is found when it is read."""
        written = super().write(data)
        self._hash.update(data)
        self._size += written
        return written

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Raise: the hash follows what is written in order."""
        raise io.UnsupportedOperation("a hashed file is written from beginning to end")

    def truncate(self, size: int | None = None, /) -> int:
        """Raise as `seek` does, for what is cut away was hashed."""
        raise io.UnsupportedOperation("a hashed file is written from beginning to end")

    def close(self) -> None:
        """Force to the disk what is written, and close."""
        if self.closed:
            return
        try:
            # what fails here (a full disk) is raised to whoever closes
            self.flush()
            os.fsync(self.fileno())
        finally:
            super().close()

    @property
    def record(self) -> FileRecord:
        """What was written so far."""
        return FileRecord(self._size, f"{_NEW}:{self._hash.hexdigest()}")


def write_hashed(path: Path, content: bytes) -> FileRecord:
    """Write a whole file, forced to the disk. Raises `OSError`."""
    with HashedFile(path) as file:
        file.write(content)
    return file.record
