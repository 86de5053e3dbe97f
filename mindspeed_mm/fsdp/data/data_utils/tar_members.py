"""Files inside tar archives, without unpacking them: a path may go through one, `shard-000.tar/0001.jpg`."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Mapping
from functools import lru_cache
from typing import BinaryIO, NamedTuple

from typing_extensions import override

from mindspeed_mm.core.errors import DataError

SUFFIX = ".tar"


class MemberSpan(NamedTuple):
    """Where a member's bytes lie in its archive."""

    start: int
    size: int
    """Bytes."""


def members_of(path: str | os.PathLike[str]) -> Mapping[str, MemberSpan]:
    """The regular files in an archive, by name, in their order; headers are read once for as long as the file stays.

    Raises:
        DataError: It is missing, compressed, cut, or no archive.
    """
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error
    return _members(os.fspath(path), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4096)
def _members(path: str, size: int, changed_ns: int) -> Mapping[str, MemberSpan]:
    try:
        # "r:" refuses compressed archives: a member of one cannot be read from its offset.
        with tarfile.open(path, "r:") as archive:
            # `tar -C folder .` writes "./" before every name, which no row does.
            found = {_plain(each.name): MemberSpan(each.offset_data, each.size) for each in archive if each.isreg()}
            last = (archive.getnames() or [""])[-1]
            ends = _has_end_mark(archive)
    except (tarfile.TarError, OSError, ValueError) as error:
        raise DataError(
            f"is not a tar archive that can be read ({error})",
            where=path,
            way_out="Write it again, uncompressed: pictures and videos are compressed already.",
        ) from error
    # tarfile stops quietly between two members, and at what is no header.
    if not ends:
        raise DataError(
            f"cannot be read beyond its member '{last}', where it does not end",
            where=path,
            way_out="Copy the archive again, or write it again: whatever writes one closes it with a block of zeros.",
        )
    return found


def _has_end_mark(archive: tarfile.TarFile) -> bool:
    """Whether a block of zeros stands where the headers of an archive, all read, come to an end."""
    assert archive.fileobj is not None
    archive.fileobj.seek(archive.offset)
    return archive.fileobj.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)


def split_member(path: str) -> tuple[str, str]:
    """Archive and member of a path that goes through an archive; the path and nothing of any other."""
    archive, separator, member = path.partition(SUFFIX + "/")
    if separator and member:
        return (archive + SUFFIX, _plain(member))
    return (path, "")


def _plain(member: str) -> str:
    return member.removeprefix("./")


def open_span(archive: BinaryIO, span: MemberSpan) -> BinaryIO:
    """A member, opened for reading; closing it closes the archive."""
    return io.BufferedReader(_Member(archive, span))


class _Member(io.RawIOBase):
    """The bytes of a span of an open file."""

    def __init__(self, file: BinaryIO, span: MemberSpan) -> None:
        self._file, self._span, self._at = file, span, 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset from the member's beginning, from here, or from its end."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._span.size}[whence]
        if base + offset < 0:
            raise ValueError(f"{base + offset} lies before the beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill a buffer as far as the member goes."""
        left = max(0, min(len(buffer), self._span.size - self._at))
        # Always: the archive's own position may have been moved.
        self._file.seek(self._span.start + self._at)
        data = self._file.read(left)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        """Close the archive together with the member."""
        self._file.close()
        super().close()
