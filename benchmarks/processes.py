"""Runs contenders as processes of their own: how long each took, what it said last, how much memory it held.

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
TURN_S = 0.2
POLL_S = 0.002


@dataclass(frozen=True)
class Finished:
    """A process that ended well."""

    turns: tuple[tuple[float, float], ...]
    """Unix times between which it ran: a single pair, unless it ran in turns with others."""
    peak_rss_mb: float
    """Highest resident size of the process itself or of one of its children, from `wait4`."""
    peak_pss_mb: float | None
    """Highest sum of proportional set sizes over the process and everything it started, where it was watched."""
    output: str

    @property
    def started(self) -> float:
        """Unix time just before it was started."""
        return self.turns[0][0]

    @property
    def wall_s(self) -> float:
        """Seconds that it ran."""
        return self.ran_s(self.turns[-1][1])

    def ran_s(self, when: float) -> float:
        """Seconds that it had run at a unix time; the turns of others do not count."""
        return sum(min(end, when) - begin for begin, end in self.turns if begin < when)

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
    with _Running(command, extra_env or {}, watch_memory) as running:
        if not running.turn(timeout_s):
            running.kill()
        return running.finished()


def run_in_turns(commands: Mapping[str, Sequence[str]], *, timeout_s: float) -> dict[str, Finished]:
    """Run several commands to their ends, one at a time, in turns of a fraction of a second.

    A shared machine drifts by a tenth within seconds. Processes that take turns meet the same weather, so that the
    ratio of their times holds. Whoever is not due is stopped by a signal, with all that it started; `Finished.ran_s`
    leaves the turns of the others out.

    Args:
        commands: By name.
        timeout_s: The most that each may run, its own turns counted.

    Raises:
        ProcessFailed: One of them ended with an error, or reached its limit.
    """
    with contextlib.ExitStack() as stack:
        everyone = {name: stack.enter_context(_Running(command, {})) for name, command in commands.items()}
        due = list(everyone.values())
        while due:
            for running in list(due):
                ended = running.turn(TURN_S)
                if not ended and running.ran_s() > timeout_s:
                    running.kill()
                    ended = True
                if ended:
                    due.remove(running)
        return {name: running.finished() for name, running in everyone.items()}


class _Running:
    """A process that runs while it has its turn; started at its first."""

    def __init__(self, command: Sequence[str], extra_env: Mapping[str, str], watch_memory: bool = False) -> None:
        self._command, self._env = list(command), environment() | dict(extra_env)
        self._watch_memory = watch_memory
        self._turns: list[tuple[float, float]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._peak_rss_mb = 0.0

    def __enter__(self) -> _Running:
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.returncode is None:
            self.kill()
        self._out.close()
        self._err.close()

    def turn(self, seconds: float) -> bool:
        """Let it run for a while; whether it has ended."""
        begin = time.time()
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdout=self._out, stderr=self._err, env=self._env, start_new_session=True
            )
            self._watch = MemoryWatch(self._process.pid)
            if self._watch_memory:
                self._watch.start()
        else:
            os.killpg(self._process.pid, signal.SIGCONT)
        while not (ended := self._has_ended()) and time.time() - begin < seconds:
            time.sleep(POLL_S)
        if not ended:
            os.killpg(self._process.pid, signal.SIGSTOP)
        self._turns.append((begin, time.time()))
        return ended

    def ran_s(self) -> float:
        """Seconds of its turns."""
        return sum(end - begin for begin, end in self._turns)

    def kill(self) -> None:
        """End it and all that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            while not self._has_ended():
                time.sleep(POLL_S)

    def finished(self) -> Finished:
        """What it left, once it has ended."""
        self._watch.stop()
        if self._process is None or self._process.returncode != 0:
            code = self._process and self._process.returncode
            raise ProcessFailed(f"{' '.join(self._command)} ended with {code}:\n{_text(self._err)[-4000:]}")
        peak_pss_mb = self._watch.peak_mb if self._watch_memory else None
        return Finished(tuple(self._turns), self._peak_rss_mb, peak_pss_mb, _text(self._out))

    def _has_ended(self) -> bool:
        process = self._process
        if process is None or process.returncode is not None:
            return True
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            self._peak_rss_mb = usage.ru_maxrss / 1024
        return bool(pid)


def environment() -> dict[str, str]:
    """The same for every contender: one thread, no network, this checkout first, and bytecode that is kept, as that of
    an installed package is: to compile all modules anew is a second of a start."""
    return {
        "OMP_NUM_THREADS": "1",
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
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


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")
