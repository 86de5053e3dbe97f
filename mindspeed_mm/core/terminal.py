"""What is printed for people: text of models, rows, files and servers is shown on a terminal, and never controls it.

Control characters (ECMA-48: escape sequences that clear the screen, set its title or write to the clipboard) are
printed as escapes, `\\x1b` for one.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict

from mindspeed_mm.core.errors import Problem

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_STYLE = re.compile(r"(\x1b\[(?:0|1|2|3[0-7]|4[0-7]|[34]8;2;\d{1,3};\d{1,3};\d{1,3})m)")
"""The colours that we set ourselves."""


def visible(text: str) -> str:
    """The text with its control characters as escapes; line ends and tabs stay."""
    return _CONTROL.sub(_escaped, text.replace("\r\n", "\n"))


def quoted(word: object) -> str:
    """One word of a command that people copy, such as a path with a blank, as a shell takes it."""
    return shlex.quote(str(word))


def say(text: object = "", *, err: bool = False, end: str = "\n", styled: bool = False) -> None:
    """Print a text for people.

    Args:
        text: Of any source.
        err: To standard error.
        end: Follows it.
        styled: It has colours that we have set, which stay.
    """
    shown = str(text)
    if styled:
        parts = _STYLE.split(shown)  # every second one is a colour
        shown = "".join(part if place % 2 else visible(part) for place, part in enumerate(parts))
    else:
        shown = visible(shown)
    stream = sys.stderr if err else sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(shown.encode(encoding, "backslashreplace").decode(encoding), end=end, file=stream, flush=True)


def say_json(value: object, indent: int | None = None) -> None:
    """Print a value as JSON, on one line unless `indent` is given."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=str)
    print(re.sub(r"[\x7f-\x9f\ud800-\udfff]", _as_json, text), flush=True)


def say_failure(message: str, exit_code: int, problems: Iterable[Problem] = ()) -> None:
    """Print on stdout, as JSON, why a command that was asked for JSON has no result: `{"error": {...}}`.

    Args:
        message: What stderr says.
        exit_code: Exit code of the command.
        problems: The findings, each with place, key and remedy; empty where there is the message alone.
    """
    say_json({"error": {"exit_code": int(exit_code), "message": message, "problems": list(map(asdict, problems))}})


def _as_json(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code == 13:
        return "\\r"
    if code < 256:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}"
