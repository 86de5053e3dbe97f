"""Splits long texts for CosyVoice3 into parts of whole sentences, about 60 to 80 tokens each, as published
(FunAudioLLM/CosyVoice, `utils/frontend_utils.py`)."""

from __future__ import annotations

import re
from collections.abc import Callable

_LONGEST, _LONG_ENOUGH, _TOO_SHORT = 80, 60, 20
_END = re.compile(r"""[.?!;:。？！；：、]+['"”’)\]]*\s*""")
"""End of a sentence or clause, with closing quotes."""


def passages(text: str, length: Callable[[str], int]) -> list[str]:
    """A text in parts.

    Args:
        text: Not empty.
        length: Number of tokens of a text.

    Returns:
        Parts without surrounding spaces. A part exceeds 80 tokens only if a sentence is long.
    """
    if length(text) <= _LONGEST:
        return [text.strip()]
    parts, current = list[str](), ""
    for sentence in _sentences(text):
        if current and length(current + sentence) > _LONGEST and length(current) > _LONG_ENOUGH:
            parts.append(current)
            current = ""
        current += sentence
    if parts and length(current) < _TOO_SHORT:
        parts[-1] += current
    else:
        parts.append(current)
    return [part.strip() for part in parts if any(map(str.isalnum, part))] or [text.strip()]


def _sentences(text: str) -> list[str]:
    found, start = list[str](), 0
    for end in _END.finditer(text):
        around = text[max(0, end.start() - 1) : end.start()] + text[end.end() : end.end() + 1]
        if len(end.group()) == 1 and len(around) == 2 and around.isdigit():
            continue  # inside a number or a time
        found.append(text[start : end.end()])
        start = end.end()
    return [*found, text[start:]] if start < len(text) else found
