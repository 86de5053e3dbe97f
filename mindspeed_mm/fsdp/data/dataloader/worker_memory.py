"""Memory of the processes that prepare batches: a leak of a decoder or of a plugin's data set is seen before the host's
out-of-memory killer sees it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_LOOK_EVERY = 64
"""Deliveries."""
_MIB = 2**20


class WorkerMemory:
    """Watches what each worker holds for itself alone: slots and mapped files, which all share, are left out.

    Args:
        most_growth_bytes: What a worker may grow by since it was first looked at, after some batches.
    """

    def __init__(self, most_growth_bytes: int) -> None:
        self._most_growth_bytes = most_growth_bytes
        self._deliveries = 0
        self._first: dict[int, int] = {}

    def note_delivery(self, workers: Sequence[int]) -> str | None:
        """What is wrong, if a worker has grown too much; looks now and then.

        Args:
            workers: Process ids, in the workers' order.
        """
        self._deliveries += 1
        if self._deliveries % _LOOK_EVERY:
            return None
        for number, worker in enumerate(workers):
            held = own_bytes(worker)
            grown = held - self._first.setdefault(worker, held)
            if grown > self._most_growth_bytes:
                return f"data worker {number} has grown by {grown / _MIB:.0f} MiB to {held / _MIB:.0f} MiB"
        return None


def own_bytes(process: int) -> int:
    """Anonymous memory of a process, its own and not shared; 0 where the system does not tell, or it is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    return 0
