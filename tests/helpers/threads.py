"""Threads that runs leave behind in this process until they are collected."""

from __future__ import annotations

import gc
from pathlib import Path

MORE = 64
_OWN = Path("/proc/self/task")
_left = 0
"""Threads that the last collection left."""


def collect_rarely() -> None:
    """Look for garbage after two hundred thousand new objects, not seven hundred: a test makes models and throws them
    away, and a tenth of the time of all tests went into looking."""
    gc.set_threshold(200_000, 10, 10)


def collect_when_many() -> None:
    """Collect garbage when there are many more threads than the last collection left.

    A model's cycles hold the process group of its run until Python looks for cycles, which it does rarely, and the
    threads of each group wake a hundred times a second: those of many runs slow down everything on the machine.
    """
    global _left
    if not _OWN.is_dir():
        return
    if _threads() > _left + MORE:
        gc.collect()
        _left = _threads()
    _left = min(_left, _threads())


def _threads() -> int:
    return _OWN.stat().st_nlink - 2  # a folder for each
