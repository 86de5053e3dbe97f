"""The nearest known word to a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], most: int = 1, likeness: float = 0.6) -> list[str]:
    """Up to `most` known words at least so like `word` (from 0 to 1), best first."""
    return difflib.get_close_matches(word, list(known), n=most, cutoff=likeness)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`"Did you mean 'x'? "` with a trailing space, or an empty string when nothing is near."""
    found = nearest(word, known)
    return f"Did you mean '{found[0]}'? " if found else ""
