"""Counts: what is one, in words and in a few characters."""

from __future__ import annotations

_LARGEST = 2**63 - 1


def is_count(value: object) -> bool:
    """Whether a value that was read is a whole number from 0 that files and tensors can count to."""
    return type(value) is int and 0 <= value <= _LARGEST


def short_count(count: int) -> str:
    """`1.72 B`, `0.40 M`, `5,120`."""
    if count >= 1e9:
        return f"{count / 1e9:.2f} B"
    if count >= 1e4:
        return f"{count / 1e6:.2f} M"
    return f"{count:,}"


def by_count(count: int, one: str, several: str) -> str:
    """The verb for so many things: `has` of one, `have` of several."""
    if count == 1:
        return one
    return several
