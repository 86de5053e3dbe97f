"""What a person sees of a verification that takes more than a moment."""

from __future__ import annotations

import os
import time
from typing import TextIO

from mindspeed_mm.fsdp.utils.work_progress import bar, clock

_QUIET_S = 5.0
_LIVE_EVERY_S = 0.5
_LINE_EVERY_S = 10.0


class VerifyProgress:
    """Runs done and the time left.

    Args:
        total: Number of runs.
        stream: Where people look.
    """

    def __init__(self, total: int, stream: TextIO) -> None:
        self._total, self._stream = total, stream
        self._live = stream.isatty() and "NO_COLOR" not in os.environ
        self._done, self._shown = 0, False
        self._began = self._told = time.monotonic()

    def heard(self, what: str) -> None:
        """A run is done; an empty string: none is, but time has passed."""
        self._done += bool(what)
        now = time.monotonic()
        every = 0.0  # the first line comes at once
        if self._live:
            every = _LIVE_EVERY_S
        elif self._shown:
            every = _LINE_EVERY_S
        if not self._done or now - self._began < _QUIET_S or now - self._told < every:
            return
        self._told, self._shown = now, True
        left_s = (now - self._began) / self._done * (self._total - self._done)
        if self._live:
            print(bar(self._done, self._total, left_s), end="", file=self._stream, flush=True)
        else:
            text = f"verify: {self._done} of {self._total} runs done, {clock(left_s)} left"
            print(text, file=self._stream, flush=True)

    def end(self) -> None:
        """Take the bar away."""
        if self._live and self._shown:
            print("\r\033[K", end="", file=self._stream, flush=True)
