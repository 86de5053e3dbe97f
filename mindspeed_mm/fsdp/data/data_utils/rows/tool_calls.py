"""Tools in rows: what the model may call, and the calls it made, in the one form that chat templates take.

The model's own chat template writes them down, so a row says only *what* is called: as OpenAI's `tool_calls`, or as the
JSON text of a `function_call` turn (LLaMA-Factory's rows, whatever their `tool_format`), bare or inside
`<tool_call>…</tool_call>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.rows.row_fields import Row, first_column, parsed_json, short
from mindspeed_mm.fsdp.data.data_utils.sample import REPAIR, RowLocation

_CALL_WAY_OUT = 'A call is {"name": …, "arguments": {…}}, or a list of such.'
_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)


def read_tools(row: Row, column: str | None, place: RowLocation) -> list[JsonObject] | None:
    """The descriptions of a row's tools: a list, or JSON text of one; each `{"type": "function", "function": {…}}` or
    what stands under `function` alone.

    Raises:
        DataError: A description has no name, or is not a description.
    """
    name = first_column(row, column, ("tools",))
    if name is None:
        return None
    value = row[name]
    if isinstance(value, str):
        value = parsed_json(value, str(place), name) if value.strip() else None
    if value in (None, [], {}):
        return None
    items = value if isinstance(value, list) else [value]
    return [_description(item, place, f"{name}[{number}]") for number, item in enumerate(items)]


def _description(item: object, place: RowLocation, key: str) -> JsonObject:
    described = parsed_json(item, str(place), key) if isinstance(item, str) else item
    if isinstance(described, dict):
        described = without_nulls(described)
        if "function" not in described:
            described = {"type": "function", "function": described}
        function = described["function"]
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return described
    raise DataError(
        f"{short(item)} does not describe a tool",
        where=str(place),
        key=key,
        way_out='A tool is {"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}.',
    )


def without_nulls(value: Any) -> Any:
    """The value without keys that are null: parquet gives every object of a column all keys of all objects."""
    if isinstance(value, dict):
        return {name: without_nulls(part) for name, part in value.items() if part is not None}
    if isinstance(value, list):
        return [without_nulls(part) for part in value]
    return value


def read_calls(calls: object, where: str, key: str) -> list[JsonObject]:
    """Calls of a turn: OpenAI's list (`{"id", "type", "function": {"name", "arguments"}}`) or a list of
    `{"name", "arguments"}`; arguments may be an object or its JSON text.

    Raises:
        DataError: A call has no name, or its arguments are not an object.
    """
    items = calls if isinstance(calls, list) else [calls]
    return [_call(item, where, f"{key}[{number}]") for number, item in enumerate(items)]


def _call(item: object, where: str, key: str) -> JsonObject:
    function = item.get("function", item) if isinstance(item, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{short(item)} is not a tool call", where=where, key=key, way_out=_CALL_WAY_OUT)
    arguments = _arguments(function, where, f"{key}.arguments")
    call: JsonObject = {}
    if isinstance(item, Mapping) and function is not item and isinstance(item.get("id"), str):
        call["id"] = item["id"]
    return call | {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _arguments(function: Mapping[str, object], where: str, key: str) -> JsonObject:
    arguments = function.get("arguments", function.get("parameters"))
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    # What stands in text was written as it is meant: its nulls are kept.
    arguments = parsed_json(arguments, where, key) if isinstance(arguments, str) else without_nulls(arguments)
    if not isinstance(arguments, dict):
        raise DataError(f"{short(arguments)} is not an object", where=where, key=key, way_out=REPAIR)
    return arguments


def read_call_text(text: str, where: str, key: str) -> tuple[str, str, list[JsonObject]]:
    """The text of a `function_call` turn.

    Returns:
        What the model thought (`<think>…</think>` at the beginning), what it said besides, and the calls.

    Raises:
        DataError: The text holds no call.
    """
    reasoning, rest = "", text.strip()
    if thought := _THOUGHT.fullmatch(text):
        reasoning, rest = thought[1].strip(), thought[2].strip()
    tagged = _TAGGED.findall(rest)
    if tagged:
        calls = [parsed_json(part, where, key) for part in tagged]
        return reasoning, _TAGGED.sub("", rest).strip(), read_calls(calls, where, key)
    if rest[:1] not in ("{", "["):
        raise DataError(f"{short(text)} holds no tool call", where=where, key=key, way_out=_CALL_WAY_OUT)
    return reasoning, "", read_calls(parsed_json(rest, where, key), where, key)
