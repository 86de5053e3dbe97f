"""What a person sees of work that takes more than a moment: a bar on a terminal, elsewhere a line at times."""

from __future__ import annotations

import os
import sys
import time
from typing import TextIO

from mindspeed_mm.core.terminal import visible

_QUIET_S = 5.0
_LIVE_EVERY_S = 0.2
_LINE_EVERY_S = 15.0
_SLOW = 0.1
"""Units a second below which the time of each is told instead."""


class WorkProgress:
    """Speaks on rank 0, of its own share.

    Args:
        unit: What is counted.
        stream: Where people look; None: stderr.
        total: Of this rank, in the unit; where it is not known yet, `begin` tells it.
        rank: Global rank.
        world_size: Number of ranks.
    """

    def __init__(
        self,
        unit: str = "samples",
        stream: TextIO | None = None,
        *,
        total: float = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._unit = unit
        self._stream, self._speaks = stream or sys.stderr, rank == 0
        self._live = self._stream.isatty() and "NO_COLOR" not in os.environ
        self._share = f" of rank 0 (of {world_size})" if world_size > 1 else ""
        self._bar_stands = False
        self.begin(total)

    def begin(self, total: float) -> None:
        """The work starts now.

        Args:
            total: Of this rank, in the unit.
        """
        self._total, self.done = total, 0.0
        self._began = self._told = time.monotonic()

    def note(self, text: str) -> None:
        """Print a line of text on rank 0, in place of the bar."""
        if self._speaks:
            self._clear()
            print(visible(text), file=self._stream, flush=True)

    def advance(self, amount: float) -> None:
        """So much more is through; 0: time has passed."""
        self.done += amount
        now = time.monotonic()
        every = 0.0
        if self._live:
            every = _LIVE_EVERY_S
        elif self._told > self._began:
            every = _LINE_EVERY_S
        if self._speaks and self.done and now - self._began >= _QUIET_S and now - self._told >= every:
            self._told = now
            self._tell(now - self._began)

    def end(self) -> None:
        """Remove the bar from the terminal, if one is shown; called when work is over or stops."""
        self._clear()

    def _tell(self, seconds: float) -> None:
        rate = self.done / seconds
        left_s = max(0.0, self._total - self.done) / rate
        speed = f"{rate:.1f} {self._unit}/s"
        if rate < _SLOW:
            speed = f"{clock(1 / rate)} each"
        if self._live:
            self._bar_stands = True
            drawn = bar(round(self.done), round(self._total), left_s)
            print(f"{drawn}  {speed}", end="", file=self._stream, flush=True)
        else:
            through = f"{self.done:.0f}/{self._total:.0f} {self._unit}{self._share}"
            told = f"{through}  {speed}  {clock(left_s)} left"
            print(told, file=self._stream, flush=True)

    def _clear(self) -> None:
        if self._bar_stands:
            print("\r\033[K", end="", file=self._stream, flush=True)
            self._bar_stands = False


def clock(seconds: float) -> str:
    """Format a duration in seconds as `hh:mm:ss`, rounded to whole seconds."""
    minutes, seconds_left = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds_left:02}"


def bar(step: int, total_steps: int, eta_s: float, width: int = 40) -> str:
    """A live progress bar on one line, redrawn in place."""
    filled = round(width * step / max(total_steps, 1))
    return f"\r\033[K  {'━' * filled}{'╌' * (width - filled)} {step}/{total_steps}  {clock(eta_s)} left"
