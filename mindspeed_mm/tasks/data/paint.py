"""Colours of a terminal, or marks in plain text where there are none: `NO_COLOR`, a pipe, a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TextIO

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

    def bad(self, text: str) -> str:
        """What stops a run."""
        return click.style(text, fg="red", bold=True) if self.colour else text

    def odd(self, text: str) -> str:
        """What a person should look at."""
        return click.style(text, fg="yellow", bold=True) if self.colour else text

    def good(self, text: str) -> str:
        """What is as it should be."""
        return click.style(text, fg="green", bold=True) if self.colour else text

    def soft(self, text: str) -> str:
        """What is beside the point."""
        return click.style(text, dim=True) if self.colour else text

    def head(self, text: str) -> str:
        """A heading."""
        return click.style(text, bold=True) if self.colour else text

    def trained(self, text: str) -> str:
        """Tokens that are trained; « » where there is no colour."""
        if not self.colour:
            return f"«{text}»"
        lines = [click.style(line, fg="black", bg="green") if line else line for line in text.split("\n")]
        return "\n".join(lines)

    def medium(self, text: str) -> str:
        """Tokens that stand for a medium."""
        return click.style(text, fg="cyan") if self.colour else text


def bars(title: str, found: Sequence[Bin], paint: Paint, mark: int | None = None) -> list[str]:
    """A histogram, a line a range; the range that holds `mark` is pointed at."""
    if not found:
        return []
    most, width = max(each.rows for each in found), len(f"{found[-1].high - 1:,}")
    lines = ["", paint.head(title)]
    for each in _joined_where_empty(found):
        filled = "█" * round(_BAR_CHARACTERS * each.rows / most) or ("▏" if each.rows else "")
        place = (
            f"{each.low:>{width},}–{each.high - 1:<{width},}" if each.high - each.low > 1 else f"{each.low:>{width},}"
        )
        pointer = paint.odd("  ← cutoff_len") if mark is not None and each.low <= mark < each.high else ""
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
