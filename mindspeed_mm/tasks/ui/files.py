"""The board's door to files: it opens plain files below one folder, follows no link, and waits for none.

A run folder may come from anywhere: a link in it could lead to somebody's keys, and a named pipe would be waited for.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from mindspeed_mm.core.errors import DataError, MMError, UsageError
from mindspeed_mm.core.folder_kinds import kind_above
from mindspeed_mm.core.terminal import visible

YAML_SUFFIXES = (".yaml", ".yml")
_LONGEST_NAME = 1000
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Stamp = tuple[int, int, int]
"""Time of the last change in ns, size in bytes and number of a file: another stamp, another content."""


def stamp_of(found: os.stat_result) -> Stamp:
    """What tells whether a file was changed."""
    return found.st_mtime_ns, found.st_size, found.st_ino


def read_head(path: Path, most_bytes: int) -> bytes:
    """The first bytes of a plain file.

    Raises:
        OSError: There is none, or it is a link, a folder, a pipe or a device.
    """
    descriptor = _open(path)
    try:
        return os.pread(descriptor, most_bytes, 0)
    finally:
        os.close(descriptor)


def read_tail(path: Path, most_bytes: int) -> bytes:
    """The last bytes of a plain file, from the beginning of a line on.

    Raises:
        OSError: As of `read_head`.
    """
    descriptor = _open(path)
    try:
        start = max(0, os.fstat(descriptor).st_size - most_bytes)
        content = os.pread(descriptor, most_bytes, start)
    finally:
        os.close(descriptor)
    if start:
        return content.partition(b"\n")[2]
    return content


def _open(path: Path) -> int:
    descriptor = os.open(path, _FLAGS)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a plain file")
    return descriptor


def plain_files(folder: Path, left_out: Iterable[str]) -> Iterator[tuple[str, Stamp]]:
    """Every file below a folder by its relative name, with its stamp.

    Args:
        folder: Where to look.
        left_out: Names in the folder itself that are not entered.

    Raises:
        DataError: A link or something that is no plain file is among them.
        OSError: The folder is gone.
    """
    skipped = frozenset(left_out)
    pending = [folder]
    while pending:
        here = pending.pop()
        for entry in sorted(os.scandir(here), key=lambda each: each.name):
            if here == folder and entry.name in skipped:
                continue
            found = entry.stat(follow_symlinks=False)
            name = os.path.relpath(entry.path, folder)
            if stat.S_ISDIR(found.st_mode):
                pending.append(Path(entry.path))
            elif stat.S_ISREG(found.st_mode):
                yield name, stamp_of(found)
            else:
                raise DataError(
                    "is a link or a device, which the board does not follow",
                    where=visible(name),
                    way_out="Replace it by the file itself, or look at the run with `mm report`.",
                )


def shown_name(path: Path, root: Path) -> str:
    """A folder's path below the board's, on one line: control characters and half characters are escapes."""
    relative = os.path.relpath(path, root)
    return visible(relative if relative != "." else path.name).replace("\n", "\\n").replace("\t", "\\t")


def inside(root: Path, name: object, suffixes: tuple[str, ...] = YAML_SUFFIXES) -> Path:
    """The file that a client's name means.

    Args:
        root: The board's folder, without links.
        name: Relative to it.
        suffixes: Endings that the name may have.

    Raises:
        UsageError: It leads elsewhere, through a link, or into what a command of ours keeps for itself; or it is no
            name for such a file.
    """
    if not isinstance(name, str) or not name or len(name) > _LONGEST_NAME or not name.isprintable():
        raise _refused(name, "is not the name of a file", "Write a name such as first.yaml.")
    parts = Path(name).parts
    if Path(name).is_absolute() or ".." in parts:
        raise _refused(name, "leads out of the folder", "Write a name below it, such as configs/first.yaml.")
    if Path(name).suffix.lower() not in suffixes or Path(name).name.startswith("."):
        raise _refused(name, f"does not end in {' or '.join(suffixes)}", "Write a name such as first.yaml.")
    path = root
    for part in parts:
        path = path / part
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            if path != root / name:
                raise _refused(name, f"is in '{part}', which is not a folder", "Make the folder first.") from None
            break
        except OSError as error:
            raise _refused(name, f"cannot be used: {error.strerror}", "Choose another name.") from error
        if stat.S_ISLNK(mode):
            raise _refused(name, f"leads through the link '{part}'", "Name the file itself.")
    above = kind_above(path)
    if above is not None:
        raise _refused(name, f"is in {above[0]}", "Keep configurations elsewhere.")
    return path


def _refused(name: object, what: str, way_out: str) -> MMError:
    return UsageError(f"'{visible(str(name)[:100])}' {what}", key="name", way_out=way_out)
