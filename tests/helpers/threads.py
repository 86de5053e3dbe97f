"""What runs leave behind in this process until garbage is collected: threads, and memory."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

MORE = 64
MORE_BYTES = 512 * 2**20
_OWN = Path("/proc/self/task")
_left = 0
"""Threads that the last collection left."""
_bytes_left = 0
"""Resident bytes that it left."""


def collect_rarely() -> None:
    """Look for garbage after two hundred thousand new objects, not seven hundred: a test makes models and throws them
    away, and a tenth of the time of all tests went into looking."""
    gc.set_threshold(200_000, 10, 10)


def collect_when_many() -> None:
    """Collect garbage when there are many more threads, or much more memory, than the last collection left.

    A model's cycles hold the process group of its run until Python looks for cycles, which it does rarely, and the
    threads of each group wake a hundred times a second: those of many runs slow down everything on the machine. Python
    counts objects, not bytes: the graph of a forecast is few objects and a gigabyte, and a worker took twelve. What is
    freed is given back to the system, too: glibc kept seven of nine gigabytes that nobody used.
    """
    global _left, _bytes_left
    if not _OWN.is_dir():
        return
    if _threads() > _left + MORE or _resident_bytes() > _bytes_left + MORE_BYTES:
        gc.collect()
        _give_back()
        _left, _bytes_left = _threads(), _resident_bytes()
    _left = min(_left, _threads())


def _give_back() -> None:
    """Let the allocator return what it holds in reserve; glibc alone has such a call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _threads() -> int:
    return _OWN.stat().st_nlink - 2  # a folder for each


def _resident_bytes() -> int:
    file = os.open("/proc/self/statm", os.O_RDONLY)  # some tests replace the methods of paths, and end after this
    try:
        return int(os.read(file, 128).split()[1]) * os.sysconf("SC_PAGE_SIZE")
    finally:
        os.close(file)
