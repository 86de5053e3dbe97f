"""Names and locks of what is being written: a draft has a name that no user chooses, and its writer holds a lock on it,
so that later writers recognise what a killed one left."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

PREFIX, DRAFT, FORMER, FILE = ".mindspeed-mm-", ".draft", ".former", ".tmp"
_NAME = re.compile(rf"{re.escape(PREFIX)}(?P<kernel>[0-9a-f]{{8}})[0-9a-f]{{24}}(?P<kind>\.draft|\.former|\.tmp)")
_ELSEWHERE_S = 3600.0
"""Where a lock may hold for the processes of one machine only, a file of another machine that was written to this
recently is taken to be in use."""


def boot_id() -> str:
    """Identity of this machine's current boot; empty where the system has none."""
    path = Path("/proc/sys/kernel/random/boot_id")
    if path.exists():
        return path.read_text().strip()
    return ""


def new_name(folder: Path, kind: str) -> Path:
    """A free name in a folder: `.mindspeed-mm-<32 hexadecimal digits><kind>`, the first eight those of this boot."""
    return folder / f"{PREFIX}{_kernel()}{uuid.uuid4().hex[:24]}{kind}"


def named(folder: Path, kind: str) -> list[Path]:
    """The entries of a folder that have a name of this kind, sorted."""
    found = [path for path in folder.glob(f"{PREFIX}*{kind}") if _NAME.fullmatch(path.name)]
    return sorted(found)


def is_draft_file(path: Path) -> bool:
    """Whether a path has the name of an unfinished file."""
    match = _NAME.fullmatch(path.name)
    return match is not None and match["kind"] == FILE


@contextmanager
def draft_file(folder: Path) -> Iterator[Path]:
    """An empty file to write into, in an existing folder. Rename it once it is complete; an error removes it. The first
    draft in a folder also removes those that killed processes left there."""
    _remove_dead_files_once(folder)
    draft, descriptor = _new_draft(folder)
    try:
        yield draft
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _new_draft(folder: Path) -> tuple[Path, int]:
    """An empty file, and its descriptor, which holds the lock."""
    while True:
        draft = new_name(folder, FILE)
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # A process that removes what killed ones left may have seen the file before it was locked, and taken it away.
        if draft.exists():
            return draft, descriptor
        os.close(descriptor)


def remove_dead_files(folder: Path) -> list[str]:
    """Remove drafts of files that no process writes any more. Returns their names."""
    removed = []
    for path in named(folder, FILE):
        with suppress(OSError), claimed(path) as is_dead:
            if is_dead and path.is_file() and not path.is_symlink() and not _may_be_elsewhere(path):
                path.unlink()
                removed.append(path.name)
    return removed


@cache
def _remove_dead_files_once(folder: Path) -> None:
    with suppress(OSError):
        remove_dead_files(folder)


def _may_be_elsewhere(path: Path) -> bool:
    match = _NAME.fullmatch(path.name)
    if match is None or match["kernel"] == _kernel():
        return False
    return time.time() - path.stat().st_mtime < _ELSEWHERE_S


@cache
def _kernel() -> str:
    return hashlib.sha256(boot_id().encode()).hexdigest()[:8]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Mark a file or folder as used by this process. Best effort: not every file system has locks."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _try_lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> None:
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Whether no other process uses a file or folder, nor begins to while the body runs. A missing one is unused."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        yield True
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)
