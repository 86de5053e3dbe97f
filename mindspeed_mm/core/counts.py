"""Counts in words and in a few characters."""

from __future__ import annotations


def short_count(count: int) -> str:
    """`1.72 B`, `0.40 M`, `5,120`."""
    if count >= 1e9:
        return f"{count / 1e9:.2f} B"
    return f"{count / 1e6:.2f} M" if count >= 1e4 else f"{count:,}"


def by_count(count: int, one: str, several: str) -> str:
    """The verb for so many things: `has` of one, `have` of several."""
    return one if count == 1 else several
