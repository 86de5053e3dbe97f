"""What a turn of a row has beside its words: marks that say whether it is trained, and how much it counts, in the
spellings of all common tools; and tools: what the model may call, and the calls it made, in the one form that chat
templates take.

`train`, `training` and `weight` are axolotl's, `loss` and `loss_scale` ms-swift's, `weight` OpenAI's, `loss_weight`
LLaMA-Factory v1's; the others are spellings of the same.

The model's own chat template writes tools down, so a row says only *what* is called: as OpenAI's `tool_calls`, or as
the JSON text of a `function_call` turn (LLaMA-Factory's rows, whatever their `tool_format`), bare or inside
`<tool_call>…</tool_call>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.rows.row_fields import Row, first_column, parsed_json, short
from mindspeed_mm.fsdp.data.data_utils.sample import REPAIR, RowLocation

_TRAINED = ("train", "trainable", "trained", "training", "is_trainable", "learn", "loss", "compute_loss", "loss_mask")
"""True or 1: the turn is trained."""
_UNTRAINED = ("mask", "masked", "is_masked", "ignore", "ignore_loss", "no_loss", "skip_loss")
"""True or 1: the turn is not trained."""
_WEIGHTS = ("weight", "loss_weight", "loss_scale")
"""How much the tokens of the turn count."""
_DETAILS = ("train_detail", "training_detail", "reasoning_training_detail")
"""Lists of parts of a turn that are trained apart (axolotl)."""
MARKS = frozenset({*_TRAINED, *_UNTRAINED, *_WEIGHTS, *_DETAILS})
_LARGEST_WEIGHT = float(np.finfo(np.float32).max)
"""Batches hold weights in fp32."""


def weight_of(message: Row, where: str, key: str) -> float:
    """How much a turn counts: 1, or its weight; nothing where any mark takes it out.

    Raises:
        DataError: A mark is not of its kind, two weights differ, or parts of the turn are marked apart.
    """
    if MARKS.isdisjoint(message):
        return 1.0
    for name in _DETAILS:
        if message.get(name) not in (None, [], {}):
            raise DataError(
                f"'{name}' trains parts of a turn, which is not done",
                where=where,
                key=f"{key}.{name}",
                way_out="Mark whole turns with train: true or false.",
            )
    trains = [_flag(message, name, where, key) for name in _TRAINED]
    masks = [_flag(message, name, where, key) for name in _UNTRAINED]
    weight = _weight(message, where, key)
    if False in trains or True in masks:
        return 0.0
    return weight


_LABELS = ("label", "kto_tag")
"""KTO's: whether the answer is a good one (TRL, ms-swift; LLaMA-Factory)."""
_OF_ROWS = frozenset({*_TRAINED, *_UNTRAINED, *_LABELS})


def check_row_marks(row: Row, place: RowLocation, *, ranking: bool) -> None:
    """Raise `DataError` for a row that says of itself that it is not to be trained, or that its answer is a bad one.

    Args:
        row: The raw row.
        place: Where it stands.
        ranking: Whether rows are preference pairs.
    """
    if _OF_ROWS.isdisjoint(row):
        return
    says = [name for name in _TRAINED if row.get(name) is False] + [
        name for name in _UNTRAINED if row.get(name) is True
    ]
    if says:
        raise DataError(
            f"'{says[0]}' {short(row[says[0]])} takes the whole row out of training",
            where=str(place),
            key=says[0],
            way_out="Leave the row out of the file.",
        )
    bad = [] if ranking else [name for name in _LABELS if row.get(name) is False]
    if bad:
        raise DataError(
            f"'{bad[0]}' false marks the answer as a bad one (KTO), and it would be taught as a good one",
            where=str(place),
            key=bad[0],
            way_out="KTO is not supported: keep the rows with good answers, or make pairs and train with DPO.",
        )


def trains_asked(message: Row) -> str | None:
    """A mark that asks to train a turn; None where there is none."""
    if MARKS.isdisjoint(message):
        return None
    return next((name for name in _TRAINED if message.get(name) is not None and message[name] in (True, 1)), None)


def _flag(message: Row, name: str, where: str, key: str) -> bool | None:
    """A mark that is true or false, 1 or 0; None where the turn has none."""
    value = message.get(name)
    if value is None:
        return None
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    what = f"{name} {short(value)} is neither true nor false"
    raise DataError(what, where=where, key=f"{key}.{name}", way_out=REPAIR)


def _weight(message: Row, where: str, key: str) -> float:
    found: dict[str, float] = {}
    for name in _WEIGHTS:
        value = message.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and 0 <= value <= _LARGEST_WEIGHT):
            what = f"{name} {short(value)} is not a number from 0 that fp32 has"
            raise DataError(what, where=where, key=f"{key}.{name}", way_out=REPAIR)
        found[name] = float(value)
    if len(set(found.values())) > 1:
        shown = ", ".join(f"{name} {value:g}" for name, value in found.items())
        raise DataError(f"the weights of the turn differ: {shown}", where=where, key=key, way_out="Keep one of them.")
    return next(iter(found.values()), 1.0)


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


def without_nulls(value: object) -> Any:
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
    return [_tool_call(item, where, f"{key}[{number}]") for number, item in enumerate(items)]


def _tool_call(item: object, where: str, key: str) -> JsonObject:
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
