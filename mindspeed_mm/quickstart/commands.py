"""Runs commands of the suite as a person would type them, and shows them."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mindspeed_mm.core.started_python import own_python, safe_environment
from mindspeed_mm.core.terminal import say


def show(words: Sequence[object], *, err: bool = False) -> None:
    """Print a command as a shell takes it; with `err` to standard error."""
    say(f"$ {shlex.join(map(str, words))}", err=err)


def run_mm(*words: object, err: bool = False) -> None:
    """Run a verb of `mm` in a process of its own; its exit code ends this program when it is not 0.

    Args:
        words: The verb and what follows it.
        err: Everything that it prints goes to standard error.
    """
    show(["mm", *words], err=err)
    run_command(own_python(["-m", "mindspeed_mm", *map(str, words)]), err=err)


def run_command(command: Sequence[str], *, finds_neighbours: bool = False, err: bool = False) -> None:
    """Run a command without showing it; its exit code ends this program when it is not 0.

    Args:
        command: The program and its words.
        finds_neighbours: It is a script that imports what lies beside it.
        err: What it prints goes to standard error.
    """
    output = sys.stderr if err else None
    environment = None if finds_neighbours else safe_environment()
    with subprocess.Popen(command, stdout=output, env=environment) as process, _signals_left_to(process):
        code = process.wait()
    if code:
        raise SystemExit(code if code > 0 else 128 - code)  # a signal is told as shells tell it


@contextmanager
def _signals_left_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """While a command runs, stopping is its business: training saves first, then ends with 75."""
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),  # a terminal sends it to both
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: process.terminate()),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
