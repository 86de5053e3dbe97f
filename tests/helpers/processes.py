"""Processes of a job, as the system lists them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank → process id of a launcher's children."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(re.search(r"^PPid:\s*(\d+)", (folder / "status").read_text(), re.M)[1])  # type: ignore[index]
            rank = re.search(rb"(?:^|\0)RANK=(\d+)\0", (folder / "environ").read_bytes())
        except OSError:
            continue
        if parent == launcher and rank:
            found[int(rank[1])] = int(folder.name)
    return found


def wait_until_gone(pids: Iterable[int], limit_s: float) -> None:
    """Wait for processes that are nobody's children here."""
    deadline = time.monotonic() + limit_s
    for pid in pids:
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline, f"process {pid} is still there after {limit_s} s"
            time.sleep(0.01)
