"""Runs one contender as a process of its own: how long it took, what it said last, how much memory it held.

The process that measures imports no torch: a fat parent's peak would be read as its child's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.machine import ROOT

SAMPLE_EVERY_S = 0.1


@dataclass(frozen=True)
class Finished:
    """A process that ended well."""

    started: float
    """Unix time just before it was started."""
    wall_s: float
    peak_rss_mb: float
    """Highest resident size of the process itself or of one of its children, from `wait4`."""
    peak_pss_mb: float | None
    """Highest sum of proportional set sizes over the process and everything it started, where it was watched."""
    output: str

    def last_json(self) -> Any:
        """The JSON on the last line of what it printed."""
        return json.loads(self.output.strip().splitlines()[-1])


class ProcessFailed(RuntimeError):
    """A contender ended with an error or was stopped at its time limit."""


def run(
    command: Sequence[str], *, timeout_s: float, extra_env: Mapping[str, str] | None = None, watch_memory: bool = False
) -> Finished:
    """Run a command to its end.

    Args:
        command: The command.
        timeout_s: After this the process and all that it started are killed.
        extra_env: Variables beyond `environment()`.
        watch_memory: Sum up proportional set sizes ten times a second. This costs time on a small machine: time and
            memory are measured in different runs.

    Raises:
        ProcessFailed: With the end of what it wrote to stderr.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started, clock = time.time(), time.perf_counter()
        process = subprocess.Popen(
            list(command), stdout=out, stderr=err, env=environment() | dict(extra_env or {}), start_new_session=True
        )
        limit = threading.Timer(timeout_s, _kill_group, (process.pid,))
        limit.start()
        watch = MemoryWatch(process.pid)
        if watch_memory:
            watch.start()
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - clock
        limit.cancel()
        watch.stop()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise ProcessFailed(f"{' '.join(command)} ended with {process.returncode}:\n{_text(err)[-4000:]}")
        return Finished(started, wall_s, usage.ru_maxrss / 1024, watch.peak_mb if watch_memory else None, _text(out))


def environment() -> dict[str, str]:
    """The same for every contender: one thread, no network, this checkout first."""
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }


class MemoryWatch:
    """Highest sum of proportional set sizes over a session of processes: shared pages count once."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.peak_mb = 0.0

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def stop(self) -> None:
        """End sampling."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY_S):
            total_kb = sum(pss_kb(pid) for pid in session_members(self._session))
            self.peak_mb = max(self.peak_mb, total_kb / 1024)


def session_members(session: int) -> list[int]:
    """Processes of a session; data workers stay in that of the command."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # After the command in parentheses: state, parent, group, session.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session:
                    members.append(int(entry.name))
    return members


def pss_kb(pid: int) -> int:
    """Proportional set size of a process; 0 when it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


def status_kb(pid: int | str, field: str) -> int:
    """A line of /proc/PID/status in KiB (`RssAnon`, `VmHWM` …); 0 when the process is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1])
    return 0


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")
