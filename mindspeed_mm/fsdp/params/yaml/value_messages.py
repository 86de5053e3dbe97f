"""pydantic's complaints in the words of this project."""

from __future__ import annotations

import re

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mindspeed_mm.core.config_path import key_of
from mindspeed_mm.core.errors import Problem
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.fsdp.params.value_types import show
from mindspeed_mm.fsdp.params.yaml.tree import Node, place_of

_WANTED = {
    "string_type": "a text",
    "model_type": "a section: write its keys below it, indented",
    "model_attributes_type": "a section: write its keys below it, indented",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
}
_LIMITS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


def problems_of(error: ValidationError, root: Node) -> list[Problem]:
    """One problem for each wrong value, at the place of the value."""
    return [_problem(details, root) for details in error.errors(include_url=False)]


def _problem(details: ErrorDetails, root: Node) -> Problem:
    location = details["loc"]
    what, way_out = _sentence(details["type"], details["input"], details.get("ctx") or {}, details["msg"])
    return Problem(what, str(place_of(root, location)), key_of(location), way_out)


def _sentence(kind: str, value: object, context: JsonObject, message: str) -> tuple[str, str]:
    if kind == "mm_value":
        # Of `value_types.fault`: what is wrong, then what to do.
        what, _, way_out = str(context["message"]).partition(". ")
        return what, way_out
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        hint = did_you_mean(value, choices) if isinstance(value, str) else ""
        return f"{show(value)} is not one of {', '.join(choices)}", hint.strip()
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        return f"{show(value)} is out of range", f"It must be {words} {context[name]}."
    if kind in _WANTED:
        quote = ""
        if kind == "string_type" and isinstance(value, bool | int | float):
            quote = " Quote it to make it text."
        return f"{show(value)} is not {_WANTED[kind]}", quote.strip()
    if kind == "missing":
        return "is not given", "Add it."
    return f"{show(value)}: {message[:1].lower()}{message[1:]}", ""
