"""Processes that the board starts: runs, and servers of what they have trained. Each is `mm` again, started from a list
of words; nothing that a browser sends becomes a word of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from mindspeed_mm.core.errors import MachineError, UsageError
from mindspeed_mm.core.json_file import JsonObject, parse_json
from mindspeed_mm.core.redaction import without_secrets
from mindspeed_mm.core.started_python import own_python, safe_environment
from mindspeed_mm.core.terminal import visible

MOST_JOBS = 16
"""Jobs that run at a time."""
_TAIL_BYTES = 1 << 14
_LONGEST_LOOK_S = 180.0
_GRACE_S = 5.0

TRAIN, SERVE = "train", "serve"


@dataclass
class BoardJob:
    """One process that the board has started, and what it prints."""

    number: int
    kind: str
    """`train` or `serve`."""
    name: str
    """The configuration, or the run, as the board names it."""
    process: subprocess.Popen[bytes]
    output: BinaryIO
    """A file without a name that holds what it prints."""
    began: float = field(default_factory=time.time)
    stops: int = 0
    """How often it was asked to stop."""

    def said(self) -> str:
        """The end of what it printed."""
        size = os.fstat(self.output.fileno()).st_size
        content = os.pread(self.output.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        return visible(without_secrets(content.decode("utf-8", "replace")))

    def to_dict(self) -> JsonObject:
        """The job as JSON shows it: how it ended, the end of its output, and the page of a server."""
        code = self.process.poll()
        said = self.said()
        return {
            "job": self.number, "kind": self.kind, "name": self.name, "began": self.began, "exit_code": code,
            "stops": self.stops, "said": said,
            "address": _page_address(said) if self.kind == SERVE and code is None else "",
        }  # fmt: skip


class Jobs:
    """The processes of one board.

    Args:
        root: Its folder, in which they run.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._jobs: list[BoardJob] = []
        self._lock = threading.Lock()

    def listed(self) -> list[JsonObject]:
        """All of them, the newest first."""
        with self._lock:
            jobs = list(reversed(self._jobs))
        return [job.to_dict() for job in jobs]

    def train(self, config: Path, name: str, nproc: int) -> BoardJob:
        """Start `mm train`, which goes on where the run was stopped. It lives on when the board ends."""
        return self._start(TRAIN, name, ["train", str(config), f"--nproc={nproc}"])

    def serve(self, run: Path, name: str) -> BoardJob:
        """Start `mm serve` on a free port of this machine, for its page. It ends with the board."""
        return self._start(SERVE, name, ["serve", str(run), "--port=0", "--json"])

    def stop(self, number: int) -> None:
        """Ask a job to stop: a run saves a checkpoint first, and ends at once if it is asked again.

        Raises:
            UsageError: There is no such job, or it has ended.
        """
        with self._lock:
            found = [job for job in self._jobs if job.number == number]
            if not found or found[0].process.poll() is not None:
                raise UsageError(f"job {number} does not run", way_out="Runs of others are stopped where they run.")
            found[0].stops += 1
            found[0].process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """End the servers; runs go on."""
        with self._lock:
            servers = [job.process for job in self._jobs if job.kind == SERVE and job.process.poll() is None]
        for process in servers:
            process.terminate()
        for process in servers:
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()

    def _start(self, kind: str, name: str, words: Sequence[str]) -> BoardJob:
        with self._lock:
            if sum(job.process.poll() is None for job in self._jobs) >= MOST_JOBS:
                raise UsageError(f"{MOST_JOBS} jobs run already", way_out="Stop one, or wait for one to end.")
            if kind == TRAIN and any(
                job.kind == TRAIN and job.name == name and job.process.poll() is None for job in self._jobs
            ):
                raise UsageError(f"'{name}' is being trained already", way_out="Look at it, or stop it.")
            output: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the job is listed
            process = subprocess.Popen(
                own_python(["-m", "mindspeed_mm", *words]),
                cwd=self._root,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=safe_environment(),
                start_new_session=True,
            )
            job = BoardJob(len(self._jobs) + 1, kind, name, process, output)
            self._jobs.append(job)
            return job


def _page_address(said: str) -> str:
    """Where a server's page is, once it has said so."""
    for line in said.splitlines():
        if line.startswith("{"):
            try:
                address = parse_json(line).get("address", "")
            except (ValueError, AttributeError):
                continue
            return str(address).removesuffix("/v1")
    return ""


def look(root: Path, words: Sequence[str]) -> tuple[int, str, str]:
    """Run a command of ours that only looks, and return its exit code, output and errors.

    Args:
        root: The folder in which it runs.
        words: Of the command, after `mm`.

    Raises:
        MachineError: It took too long.
    """
    try:
        done = subprocess.run(
            own_python(["-m", "mindspeed_mm", *words]),
            cwd=root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=safe_environment(),
            timeout=_LONGEST_LOOK_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        way_out = f"Run `mm {' '.join(words[:2])}` in a terminal."
        raise MachineError(f"there was no answer in {_LONGEST_LOOK_S:.0f} s", way_out=way_out) from error
    out, err = (each.decode("utf-8", "replace") for each in (done.stdout, done.stderr))
    return done.returncode, out, visible(without_secrets(err))


def check_whole(root: Path, config: Path) -> JsonObject:
    """What `mm check` finds in a file, from its text to its first batch, as its `--json` says it.

    Raises:
        MachineError: It did not answer.
    """
    code, out, err = look(root, ["check", str(config), "--json"])
    try:
        found: JsonObject = parse_json(out)
    except ValueError as error:
        raise MachineError(f"mm check ended with exit code {code}: {err.strip()[-200:]}") from error
    return found
