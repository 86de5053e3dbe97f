"""The border of a process that a script of the provider API is: errors as people read them, and an exit code."""

from __future__ import annotations

import os
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from mindspeed_mm.core.errors import ExitCode, MMError
from mindspeed_mm.core.terminal import say

PACKAGE = Path(__file__).resolve().parents[3]


def run_entry(call: Callable[[], object]) -> None:
    """Call what a script does, and end the process where it fails: a message without a traceback (with one where
    `MM_TRACEBACK=1`), and the exit code of the error.

    Args:
        call: `pretrain` with its functions, for one.
    """
    # Python puts a script's folder first: inside the package, `models` and `core` would become top-level packages.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != PACKAGE]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        call()
    except MMError as error:
        _exit_with(error)


def end_scripts_by_their_errors() -> None:
    """Let an error that a script of one's own does not catch end it as `run_entry` does. Does nothing where somebody
    else has taken `sys.excepthook`."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _end_or_trace


def _end_or_trace(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, MMError):
        _exit_with(error)  # Python takes the exit code of a hook that exits
    sys.__excepthook__(kind, error, trace)


def _exit_with(error: MMError) -> NoReturn:
    text, rank = str(error), os.environ.get("RANK", "0")
    if os.environ.get("MM_TRACEBACK") == "1":
        text = "".join(traceback.format_exception(error))
    prefix = "" if rank == "0" else f"[rank {rank}] "
    # `os._exit` drops what is still buffered.
    sys.stdout.flush()
    say(textwrap.indent(text.rstrip("\n"), prefix, lambda _line: True), err=True)
    if error.exit_code != ExitCode.RESUMABLE and "RANK" in os.environ:
        os._exit(int(error.exit_code))  # collectives that are under way would be waited for
    sys.exit(int(error.exit_code))
