"""The border of a process that a script of the provider API is: errors as people read them, and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from mindspeed_mm.core.errors import ExitCode, MMError

PACKAGE = Path(__file__).resolve().parents[3]


def run_entry(call: Callable[[], object]) -> None:
    """Call what a script does, and end the process where it fails: a message without a traceback (with one where
    `MM_TRACEBACK=1`), and the exit code of the error.

    Args:
        call: `pretrain` with its functions, for one.
    """
    # Of a script inside the package Python puts the folder in front: its `models` and `core` are nobody's packages.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != PACKAGE]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        call()
    except MMError as error:
        text = traceback.format_exc() if os.environ.get("MM_TRACEBACK") == "1" else str(error)
        rank = os.environ.get("RANK", "0")
        prefix = "" if rank == "0" else f"[rank {rank}] "
        sys.stdout.flush()
        print("\n".join(prefix + line for line in text.splitlines()), file=sys.stderr, flush=True)
        if error.exit_code != ExitCode.RESUMABLE and "RANK" in os.environ:
            os._exit(int(error.exit_code))  # collectives that are under way would be waited for
        sys.exit(int(error.exit_code))
