"""Starts several processes as the ranks of one job on this machine."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from benchmarks import processes

POLL_S = 0.05


def run_ranks(words: Sequence[str], ranks: int, timeout_s: float) -> None:
    """`python -m WORDS` on `ranks` processes, told their places by torchrun's variables; they meet as they like.

    Raises:
        ProcessFailed: One ended with an error, or the time was used up; with the end of what all wrote to stderr.
    """
    with tempfile.TemporaryFile() as errors:
        started = [
            subprocess.Popen(
                [sys.executable, "-m", *words],
                stdout=errors,
                stderr=errors,
                env=processes.environment() | _place(rank, ranks),
            )
            for rank in range(ranks)
        ]
        deadline = time.monotonic() + timeout_s
        while any(one.poll() is None for one in started):
            if time.monotonic() > deadline or any(one.poll() for one in started):
                for one in started:
                    one.kill()
            time.sleep(POLL_S)
        if any(one.returncode for one in started):
            errors.seek(0)
            text = errors.read().decode("utf-8", "replace")
            raise processes.ProcessFailed(f"{' '.join(words)} on {ranks} ranks:\n{text[-4000:]}")


def _place(rank: int, ranks: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
