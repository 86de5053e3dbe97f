"""Reads JSON files that others wrote: what is not an object, for whatever reason, is one error that names the file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import MMError

JsonObject = dict[str, Any]
"""What stands between { and } in a JSON text."""


def parse_json(text: str | bytes, *, finite: bool = False) -> Any:
    """`json.loads`, whose every refusal is a ValueError: nesting that is too deep too, and bytes that are not text.

    Args:
        text: The JSON.
        finite: Reject `NaN` and `Infinity`, which are not JSON, and numbers too large for a float.
    """
    try:
        return json.loads(text, parse_constant=_not_finite, parse_float=_finite) if finite else json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _not_finite(name: str) -> float:
    raise ValueError(f"the number {name} is not finite")


def _finite(text: str) -> float:
    return float(text) if math.isfinite(float(text)) else _not_finite(text[:40])


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
    return "nothing (null)" if content is None else f"the value {json.dumps(content)[:40]}"
