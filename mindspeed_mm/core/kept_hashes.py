"""SHA-256 of files that seldom change, kept on the disk: of the processes of a host one reads a file, and once.

A hash counts for as long as a file's size, times and inode stay. Clocks tick coarsely: a file that changed a moment
before it was hashed may change again unseen. Its hash is not kept; git calls such a file racy
(https://git-scm.com/docs/racy-git).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import time
from pathlib import Path

from mindspeed_mm.core.artifacts import sha256_file
from mindspeed_mm.core.drafts import draft_file
from mindspeed_mm.core.json_file import parse_json

FOLDER = "file-hashes"
_RACY_NS = 2_000_000_000
_POLL_S = 0.05
_MOST_IN_A_FOLDER = 256
_log = logging.getLogger(__name__)

Mark = tuple[int, int, int, int]
"""Size, time of change of content and of attributes in ns, inode: none stays when a file is written or replaced."""

_here: dict[str, tuple[Mark, str]] = {}
"""What this process knows, by path."""


def user_cache() -> Path | None:
    """The user's folder for what can be made again: `$XDG_CACHE_HOME/mindspeed-mm`, else `~/.cache/mindspeed-mm`; None
    where there is no home."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():  # others do not count: https://specifications.freedesktop.org/basedir-spec
        return named / "mindspeed-mm"
    try:
        return Path.home() / ".cache" / "mindspeed-mm"
    except RuntimeError:
        return None


def kept_sha256(path: Path, cache_dir: str | Path | None = None) -> str:
    """SHA-256 of a file, in hexadecimal; read only where no process has read it before, as it is now.

    Args:
        path: The file.
        cache_dir: Where hashes are kept; None: in the user's cache. Where nothing can be written, each process reads.

    Raises:
        OSError: The file cannot be read.
    """
    name = str(path.absolute())
    mark, now = mark_of(path.stat()), time.time_ns()
    _, modified_ns, changed_ns, _ = mark
    # A file that was written just now may change again within one tick of its clock, which its mark would not
    # show.
    if max(modified_ns, changed_ns) + _RACY_NS >= now:
        return sha256_file(path)
    known_mark, known = _here.get(name, (None, ""))
    if known_mark != mark:
        folder = user_cache() if cache_dir is None else Path(cache_dir)
        known = sha256_file(path) if folder is None else _KeptHash(folder, name, mark).hash()
        if mark_of(path.stat()) == mark:
            _here[name] = (mark, known)
    return known


def mark_of(status: os.stat_result) -> Mark:
    """What tells a file from what it was."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


class _KeptHash:
    """The kept hash of one file, a small file of its own: writers of different ones do not meet.

    Args:
        cache: Of the user, or of the data set.
        name: Absolute path of the file.
        mark: Of the file as it is now.
    """

    def __init__(self, cache: Path, name: str, mark: Mark) -> None:
        self._name, self._file, self._mark = name, Path(name), mark
        digest = hashlib.sha256(os.fsencode(name)).hexdigest()
        self._folder = cache / FOLDER / digest[:2]
        self._path = self._folder / f"{digest[2:]}.json"

    def hash(self) -> str:
        """The kept one; else the file's, which is kept. Who comes while another process reads waits for it."""
        found = self._read()
        if found is not None:
            return found
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            _log.debug("the hash of %s is not kept: %s", self._name, error)
            return sha256_file(self._file)
        try:
            while not _is_locked(lock):
                time.sleep(_POLL_S)
                if (found := self._read()) is not None:
                    return found
            return self._read() or self._made()
        finally:
            os.close(lock)

    def _made(self) -> str:
        found = sha256_file(self._file)
        if mark_of(self._file.stat()) == self._mark:
            self._keep(found)
        return found

    def _read(self) -> str | None:
        """What is kept of the file as it is now; whatever else stands there does not count."""
        try:
            check, _, told = self._path.read_text(encoding="utf-8").partition(" ")
            content = parse_json(told.encode()) if check == _entry_digest(told) else {}
        except (OSError, ValueError):
            return None
        is_same = content.get("path") == self._name and tuple(content.get("mark", ())) == self._mark
        if is_same:
            return str(content["sha256"])
        return None

    def _keep(self, found: str) -> None:
        told = json.dumps({"path": self._name, "mark": self._mark, "sha256": found})
        try:
            with draft_file(self._folder) as draft:
                draft.write_text(f"{_entry_digest(told)} {told}", encoding="utf-8")
                draft.replace(self._path)
            entries = list(self._folder.glob("*.json"))
            if len(entries) > _MOST_IN_A_FOLDER:
                entries.sort(key=lambda path: path.stat().st_mtime_ns)
                for path in entries[:-_MOST_IN_A_FOLDER]:
                    path.unlink(missing_ok=True)
        except OSError as error:
            _log.debug("the hash of %s is not kept: %s", self._name, error)


def _entry_digest(text: str) -> str:
    """Of an entry: one that a crash has cut, or a disk has changed, is told."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_locked(descriptor: int) -> bool:
    """Whether the lock is ours now. Where the file system has none, all read at once."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True
