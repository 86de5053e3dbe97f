"""Texts that cannot be written as UTF-8: half a character, which JSON's escapes and a shell's bytes can hold."""

from __future__ import annotations

import json

from mindspeed_mm.core.errors import DataError

HALF_CHARACTER = "a lone surrogate (half a character)"


def has_lone_surrogate(value: object) -> bool:
    """Whether a text, or one anywhere in a JSON value, holds half a character. Tokenisers and files take none."""
    try:
        # of nested values in one pass; UTF-8 has no code for half a character
        json.dumps(value, ensure_ascii=False, default=str).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def check_whole_characters(value: object, where: str) -> None:
    """Raise `DataError` when a JSON value, or a text, holds half a character."""
    if has_lone_surrogate(value):
        raise DataError(f"the text holds {HALF_CHARACTER}", where=where, way_out="Write the text as UTF-8.")
