"""The one reader of JSON that another program or a person wrote: whatever is wrong with it is a `ValueError`, or one
error that names the file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.core.whole_text import HALF_CHARACTER, has_lone_surrogate

JsonObject = dict[str, Any]
"""What stands between { and } in a JSON text."""
JsonMapping = Mapping[str, Any]
"""A JSON object, or a part of a configuration, that is only read."""

_MOST_DIGITS = 300
"""Of a whole number: more than any float can hold."""


def parse_json(
    text: str | bytes, *, finite: bool = False, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """`json.loads`, whose every refusal is a `ValueError`.

    Args:
        text: The JSON.
        finite: Reject `NaN` and `Infinity`, which are not JSON.
        pairs: Makes an object of its keys and values (default: a dict in which the last of equal keys counts).

    Raises:
        ValueError: It is not JSON or not text, is nested too deeply, or holds half a character or a number that is too
            large for a float.
    """
    if not isinstance(text, str):
        text = _decoded(text)
    elif not text.isascii() and has_lone_surrogate(text):
        raise ValueError(f"it holds {HALF_CHARACTER}")
    constant = _not_finite if finite else None
    try:
        value = json.loads(
            text, parse_int=whole_number, parse_float=fraction, parse_constant=constant, object_pairs_hook=pairs
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    # only escapes can make half a character of valid text, and looking for one costs a second pass
    if "\\u" in text and has_lone_surrogate(value):
        raise ValueError(f"it holds {HALF_CHARACTER}")
    return value


def _decoded(content: bytes) -> str:
    """In the encoding that JSON's first bytes tell. `json.loads` would let the bytes of half a character pass."""
    encoding = json.detect_encoding(content)
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not {encoding.upper()} text: {error.reason} at byte {error.start}") from error


def whole_number(text: str) -> int:
    """`int` of a JSON number; `ValueError` for one that no float can hold."""
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits is too large")
    return int(text)


def fraction(text: str) -> float:
    """`float` of a JSON number; `ValueError` for one that is too large."""
    value = float(text)
    if math.isfinite(value):
        return value
    return _not_finite(text)


def _not_finite(text: str) -> float:
    raise ValueError(f"the number {text[:40]} is not finite")


def read_json_object(
    path: Path, error: type[MMError], *, key: str = "", way_out: str = "Copy the file again."
) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        path: The file.
        error: Class of what is raised.
        key: The configuration key that led here, for the message.
        way_out: What to do about a file that is broken.

    Raises:
        MMError: Of class `error`. The file is not there, may not be read, is a folder, or holds anything else.
    """
    try:
        content = parse_json(path.read_bytes())
    except OSError as problem:
        raise error(f"cannot be read: {problem.strerror}", where=str(path), key=key) from problem
    except ValueError as problem:
        raise error(f"is not valid JSON: {problem}", where=str(path), key=key, way_out=way_out) from problem
    if not isinstance(content, dict):
        raise error(f"holds {_kind(content)}, not a table of settings", where=str(path), key=key, way_out=way_out)
    return content


def _kind(content: object) -> str:
    if isinstance(content, list):
        return "a list"
    if content is None:
        return "nothing (null)"
    return f"the value {json.dumps(content)[:40]}"
