"""The processors that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that this process may run on: a container or a scheduler may allow fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):  # Linux only
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
