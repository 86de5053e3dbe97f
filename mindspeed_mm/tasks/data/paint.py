"""Colours of a terminal, or marks in plain text where there are none: `NO_COLOR`, a pipe, a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TextIO

import click

from mindspeed_mm.tasks.data.histogram import Bin

_BAR_CHARACTERS = 40


class Paint:
    """Puts text into colour.

    Args:
        colour: Whether there is any.
    """

    def __init__(self, colour: bool) -> None:
        self.colour = colour

    @classmethod
    def of(cls, stream: TextIO) -> Paint:
        """Colour on a terminal, unless `NO_COLOR` is set."""
        return cls(stream.isatty() and not os.environ.get("NO_COLOR"))

    def _styled(self, text: str, **style: Any) -> str:
        return click.style(text, **style) if self.colour else text

    def bad(self, text: str) -> str:
        """Return text in bold red, for what would stop a run; unchanged without colour."""
        return self._styled(text, fg="red", bold=True)

    def odd(self, text: str) -> str:
        """What a person should look at."""
        return self._styled(text, fg="yellow", bold=True)

    def good(self, text: str) -> str:
        """What is as it should be."""
        return self._styled(text, fg="green", bold=True)

    def soft(self, text: str) -> str:
        """What is beside the point."""
        return self._styled(text, dim=True)

    def head(self, text: str) -> str:
        """Return text in bold, for a heading; unchanged without colour."""
        return self._styled(text, bold=True)

    def trained(self, text: str) -> str:
        """Tokens that are trained; « » where there is no colour."""
        if not self.colour:
            return f"«{text}»"
        lines = text.split("\n")
        for number, line in enumerate(lines):
            if line:
                lines[number] = click.style(line, fg="black", bg="green")
        return "\n".join(lines)

    def medium(self, text: str) -> str:
        """Tokens that stand for a medium."""
        return self._styled(text, fg="cyan")


def bars(title: str, found: Sequence[Bin], paint: Paint, mark: int | None = None) -> list[str]:
    """A histogram, a line a range; the range that holds `mark` is pointed at."""
    if not found:
        return []
    most, width = max(each.rows for each in found), len(f"{found[-1].high - 1:,}")
    lines = ["", paint.head(title)]
    for each in _joined_where_empty(found):
        filled = "█" * round(_BAR_CHARACTERS * each.rows / most)
        if each.rows and not filled:
            filled = "▏"  # a few rows are seen too
        place, last = f"{each.low:>{width},}", each.high - 1
        if last > each.low:
            place += f"–{last:<{width},}"
        pointer = ""
        if mark is not None and each.low <= mark < each.high:
            pointer = paint.odd("  ← cutoff_len")
        lines.append(f"  {place:<{2 * width + 1}}  {filled:<{_BAR_CHARACTERS}} {each.rows:,}{pointer}")
    return lines


def _joined_where_empty(found: Sequence[Bin]) -> list[Bin]:
    """The ranges, those without rows joined to one where they stand side by side."""
    joined: list[Bin] = []
    for each in found:
        if joined and not each.rows and not joined[-1].rows:
            joined[-1] = joined[-1]._replace(high=each.high)
        else:
            joined.append(each)
    return joined
