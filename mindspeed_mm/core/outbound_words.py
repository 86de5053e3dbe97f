"""What answers of other programs say, for messages."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from mindspeed_mm.core.json_file import parse_json

_LONGEST_MESSAGE = 300


def read_json(data: bytes) -> Any:
    """The value of a JSON text from elsewhere.

    Raises:
        ValueError: It is not JSON or not UTF-8, nested too deeply, or holds a number that is not finite or half a
            character.
    """
    return parse_json(data, finite=True)


def one_line(text: str) -> str:
    """A text of a stranger for a message: on one line, not too long."""
    return " ".join(text.split())[:_LONGEST_MESSAGE]


def message_in(body: bytes) -> str:
    """What an error's body says, in the forms of OpenAI's interface and of FastAPI; else its text, if it is no page."""
    try:
        found = read_json(body)
    except ValueError:
        text = one_line(body[: 4 * _LONGEST_MESSAGE].decode(errors="replace"))
        if text.startswith("<"):  # a page of a proxy
            return ""
        return text
    for name in ("error", "detail", "message"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    if not isinstance(found, str):
        found = json.dumps(found, ensure_ascii=False)
    return one_line(found)


def phrase_of(status: int) -> str:
    """What a status means, as HTTP has it."""
    if status in set(HTTPStatus):
        return HTTPStatus(status).phrase
    return "it does not say why"


def reason_words(error: Exception) -> str:
    """Why something failed, in the system's words; on one line."""
    reason = error
    if error.args and isinstance(error.args[0], Exception):  # httpcore2 wraps the system's error
        reason = error.args[0]
    said = getattr(reason, "strerror", None) or str(reason)
    if isinstance(error, KeyError) or not said:  # the text of a KeyError is the key alone
        said = f"{type(reason).__name__}: {said}"
    return one_line(said)


def is_not_offered(status: int) -> bool:
    """Whether a server says that it does not have what was asked for."""
    return status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED)
