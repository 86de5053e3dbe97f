"""Threads that runs leave behind in this process until they are collected."""

from __future__ import annotations

import gc
from pathlib import Path

MOST = 64
_OWN = Path("/proc/self/task")


def collect_when_many() -> None:
    """Collect garbage when there are many threads.

    A model's cycles hold the process group of its run until Python looks for cycles, which it does rarely, and the
    threads of each group wake a hundred times a second: those of many runs slow down everything on the machine.
    """
    if _OWN.is_dir() and sum(1 for _ in _OWN.iterdir()) > MOST:
        gc.collect()
