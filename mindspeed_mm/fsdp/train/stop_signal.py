"""SIGTERM, SIGUSR1 and Ctrl-C ask for a saved stop; a second one stops at once."""

from __future__ import annotations

import os
import signal
from types import FrameType

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STOPPED_AT_ONCE = 130


class StopSignal:
    """Remembers that this process was asked to stop. Ranks agree on it in the step's own reduction."""

    def __init__(self) -> None:
        self.requested = False
        self._previous = {number: signal.signal(number, self._on_signal) for number in HANDLED}

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            os._exit(STOPPED_AT_ONCE)
        self.requested = True
