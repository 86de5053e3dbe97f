"""SIGTERM, SIGUSR1, Ctrl-C and a closed terminal ask for a saved stop; a second one stops at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from mindspeed_mm.fsdp.distributed.job.launcher_life import launcher_of_this_rank
from mindspeed_mm.fsdp.train.run.launched import STOPPED_AT_ONCE, LaunchFolder

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
SAME_WISH_S = 1.0
"""torchrun passes on what a terminal has already sent to the ranks: both together are one wish."""


class StopSignal:
    """Whether this process was asked to stop, while the body of a `with` runs. Ranks agree on it in the step's own
    reduction. Signals that the process was started to ignore (`nohup`) stay ignored.

    Args:
        launch: The launcher's folder, when `mm train --nproc N` started this process.
        record_end: Called with status and exit code before a second signal ends the process.
        raises: Raise `KeyboardInterrupt` at the second signal instead of ending the process.

    A rank whose launcher (that command's, or torchrun) is gone stops too: nothing else would end it.
    """

    def __init__(
        self,
        launch: LaunchFolder | None = None,
        record_end: Callable[[str, int], None] | None = None,
        *,
        raises: bool = False,
    ) -> None:
        self._launch, self._record_end, self._raises = launch, record_end, raises
        self._launcher = launcher_of_this_rank(os.environ)
        self._signalled_at: float | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._same_wish_s = SAME_WISH_S if "TORCHELASTIC_RUN_ID" in os.environ else 0.0

    @property
    def requested(self) -> bool:
        """Whether a stop was asked for."""
        if self._signalled_at is not None:
            return True
        if self._launcher is not None and os.getppid() != self._launcher:
            return True
        return self._launch is not None and self._launch.stop_asked()

    def __enter__(self) -> StopSignal:
        in_main_thread = threading.current_thread() is threading.main_thread()  # Python hands signals to no other
        listening = [n for n in HANDLED if in_main_thread and signal.getsignal(n) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._on_signal) for number in listening}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signalled_at is None:
            self._signalled_at = now
            if self._launch is None and os.environ.get("RANK", "0") == "0":  # a launcher answers for its ranks
                say_stopping()
        elif now - self._signalled_at > self._same_wish_s:
            if self._raises:
                raise KeyboardInterrupt
            if self._record_end is not None:
                self._record_end("stopped", STOPPED_AT_ONCE)
            os._exit(STOPPED_AT_ONCE)


def say_stopping() -> None:
    """Answer the first signal at once: a step may take minutes."""
    text = "stopping after this step; once more (Ctrl-C) to stop at once"
    start = "\n" if sys.stderr.isatty() else ""  # a terminal has written ^C
    try:
        print(start + text, file=sys.stderr, flush=True)
    except RuntimeError:  # the signal came while the same stream was being written to
        os.write(2, f"{text}\n".encode())
