"""Takes secrets out of what a run writes down: passwords, access tokens and API keys, in text and in nested values."""

from __future__ import annotations

import re
from typing import Any

REDACTED = "•••"

_NAMES = (
    r"(?:password|passwd|secret|api_?key|access_?key|private_?key|credentials?"
    r"|(?:access|auth|api|bearer|hf|hub|wandb|github|git)_?token)"
)
"""Words that a key ends in. A bare `token` counts too, but `eos_token` and its like do not."""

_KEY = re.compile(rf"(?i)(?:.*[._-])?{_NAMES}|token")
_ASSIGNMENT = re.compile(
    rf"""(?ix)
    (?P<key> (?<![\w-]) (?:[\w.-]*[._-])? {_NAMES} | (?<![\w.-]) (?:[\w.-]+\.)? token )
    (?P<sign> ["']? \s* [:=] \s* )
    (?! null\b | ~ )
    (?: "[^"\n]*" | '[^'\n]*' | [^\s,}}\]#]+ )
    """
)
_SHAPES = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})\b")
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")


def without_secrets(text: str) -> str:
    """The text with the values of secret keys, known shapes of tokens and passwords in addresses taken out."""
    text = _ASSIGNMENT.sub(rf"\g<key>\g<sign>{REDACTED}", text)
    return _IN_ADDRESS.sub(REDACTED, _SHAPES.sub(REDACTED, text))


def redact(value: Any, key: str = "") -> Any:
    """Nested dicts and lists with their secrets taken out: strings under secret keys whole, other strings as text."""
    if isinstance(value, dict):
        return {name: redact(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, key) for item in value]
    if isinstance(value, str):
        return REDACTED if value and _KEY.fullmatch(key) else without_secrets(value)
    return value
