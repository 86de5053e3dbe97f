"""Rows with a list of messages (ShareGPT, MLLM, LLaVA, OpenAI, tools) → messages as chat templates take them.

One reader for all of them: a message is an object with a role and a content, under configured names or the two usual
spellings (`from`/`value`, `role`/`content`); OpenAI's further fields are read wherever they stand.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.rows.media_parts import read_parts, split_text
from mindspeed_mm.fsdp.data.data_utils.rows.row_fields import (
    ATTR_KEY,
    Row,
    first_column,
    first_given,
    short,
    text_of,
    wrong_field,
)
from mindspeed_mm.fsdp.data.data_utils.rows.sources import RowFormat
from mindspeed_mm.fsdp.data.data_utils.rows.tool_calls import read_call_text, read_calls
from mindspeed_mm.fsdp.data.data_utils.sample import REPAIR, RowLocation, Sample

MESSAGE_COLUMNS = ("conversations", "messages")
_TAGS = (("role", "content"), ("from", "value"))
_CALL = "function_call"
"""The role of a turn that is nothing but tool calls, written as text."""
_USUAL_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    _CALL: _CALL,
    "tool_call": _CALL,
}
_LARGEST_WEIGHT = float(np.finfo(np.float32).max)
"""Batches hold weights in fp32."""
_REASONING = ("reasoning_content", "reasoning", "thinking")


def from_messages(row: Row, row_format: RowFormat, place: RowLocation) -> Sample:
    """A row whose messages are a list, with its system prompt in the list or in a column.

    Raises:
        DataError: Naming the message and the field.
    """
    column = first_column(row, row_format.messages, MESSAGE_COLUMNS)
    if column is None or not isinstance(row[column], list):
        name = column or row_format.messages or MESSAGE_COLUMNS[0]
        if column is None and name in MESSAGE_COLUMNS:  # one of them may be there and hold null
            name = next((usual for usual in MESSAGE_COLUMNS if usual in row), name)
        raise _no_turns(name, row, place)
    sample = Sample(place)
    add_messages(sample, row[column], row_format)
    add_system(sample, row, row_format)
    return sample


def add_system(sample: Sample, row: Row, row_format: RowFormat) -> None:
    """Put the prompt of the system column first, unless the messages have one."""
    column = "system" if row_format.system is None else row_format.system
    system = text_of(row, column, sample.place)
    if system and not any(message["role"] == "system" for message in sample.messages):
        sample.messages.insert(0, {"role": "system", "content": split_text(system)})
        sample.weights.insert(0, None)


def add_messages(sample: Sample, messages: list[Any], row_format: RowFormat, field: str = "message") -> None:
    """Append messages of a row.

    Args:
        sample: To append to.
        messages: As the row has them.
        row_format: Tags.
        field: What to call a message in errors, before its number.
    """
    where = str(sample.place)
    for number, message in enumerate(messages):
        read, weight = _message(message, row_format, where, f"{field} {number}")
        sample.messages.append(read)
        sample.weights.append(weight)


def _message(message: object, row_format: RowFormat, where: str, key: str) -> tuple[JsonObject, float | None]:
    """A message as chat templates take it, and its weight."""
    if not isinstance(message, dict):
        raise DataError(f"{short(message)} is not a message", where=where, key=key, way_out=REPAIR)
    role_tag, content_tag = _tags(message, row_format, where, key)
    role = _role(message[role_tag], row_format, where, key)
    content = message.get(content_tag)
    read: JsonObject = {"role": role}
    if role == _CALL:
        read = {"role": "assistant", **_spelled_call(content, where, f"{key}.{content_tag}")}
    else:
        calls = _calls(message, where, key) if role == "assistant" else None
        read["content"] = _content(content, calls is not None, where, f"{key}.{content_tag}")
        if calls:
            read["tool_calls"] = calls
    if role == "assistant":
        read |= _reasoning(message, where, key)
    if role == "tool":
        for name in ("name", "tool_call_id"):
            if isinstance(message.get(name), str):
                read[name] = message[name]
    weight: float | None = _weight(message, where, key)
    if read["role"] != "assistant" and weight == 1:
        weight = None
    return read, weight


def _tags(message: Row, row_format: RowFormat, where: str, key: str) -> tuple[str, str]:
    """Configured tags, else those of the two usual spellings; the content of a turn with tool calls may be left out."""
    configured = (row_format.role_tag, row_format.content_tag)
    for role_tag, content_tag in (configured, *_TAGS):
        if role_tag in message and (content_tag in message or "tool_calls" in message or "function_call" in message):
            return role_tag, content_tag
    raise DataError(
        f"has the fields {sorted(message)}, not '{configured[0]}' and '{configured[1]}'",
        where=where,
        key=key,
        way_out=f"Set {ATTR_KEY}.role_tag and content_tag.",
    )


def _role(tag: object, row_format: RowFormat, where: str, key: str) -> str:
    roles = _role_words(row_format)
    if isinstance(tag, str) and tag in roles:
        return roles[tag]
    raise DataError(
        f"unknown role {short(tag)}",
        where=where,
        key=key,
        way_out=f"Known: {', '.join(roles)}. Others: {ATTR_KEY}.user_tag, assistant_tag and so on.",
    )


@lru_cache(maxsize=64)
def _role_words(row_format: RowFormat) -> dict[str, str]:
    return _USUAL_ROLES | {
        row_format.user_tag: "user",
        row_format.assistant_tag: "assistant",
        row_format.system_tag: "system",
        row_format.observation_tag: "tool",
        row_format.function_tag: _CALL,
    }


def _content(content: object, may_be_absent: bool, where: str, key: str) -> str | list[JsonObject]:
    if isinstance(content, list):
        return read_parts(content, where, key)
    if content is None and may_be_absent:
        return ""
    if not isinstance(content, str):
        raise DataError(f"{short(content)} is not text", where=where, key=key, way_out=REPAIR)
    return split_text(content)


def _calls(message: Row, where: str, key: str) -> list[JsonObject] | None:
    """The calls of a turn of the model, in OpenAI's form of today or of old (`function_call`)."""
    for name in ("tool_calls", "function_call"):
        if message.get(name):
            return read_calls(message[name], where, f"{key}.{name}")
    return None


def _spelled_call(content: object, where: str, key: str) -> JsonObject:
    if isinstance(content, dict | list) and content:
        return {"content": "", "tool_calls": read_calls(content, where, key)}
    if not isinstance(content, str):
        raise DataError(f"{short(content)} is not text", where=where, key=key, way_out=REPAIR)
    reasoning, said, calls = read_call_text(content, where, key)
    thought = {"reasoning_content": reasoning} if reasoning else {}
    return {"content": split_text(said), "tool_calls": calls, **thought}


def _reasoning(message: Row, where: str, key: str) -> dict[str, str]:
    name = first_given(message, _REASONING)
    if name is None:
        return {}
    if not isinstance(message[name], str):
        raise DataError(f"{short(message[name])} is not text", where=where, key=f"{key}.{name}", way_out=REPAIR)
    return {"reasoning_content": message[name]} if message[name] else {}


def _weight(message: Row, where: str, key: str) -> float:
    """How much a turn counts: 1, or its `weight`; nothing with `train: false` or `mask: true`."""
    weight, train, mask = message.get("weight"), message.get("train", message.get("trainable")), message.get("mask")
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if weight is not None and not (is_number and 0 <= weight <= _LARGEST_WEIGHT):
        what = f"weight {short(weight)} is not a number from 0 that fp32 has"
        raise DataError(what, where=where, key=f"{key}.weight", way_out=REPAIR)
    for name, flag in (("train", train), ("mask", mask)):
        if flag not in (None, True, False):  # 0 and 1 count as well
            raise DataError(
                f"{name} {short(flag)} is neither true nor false", where=where, key=f"{key}.{name}", way_out=REPAIR
            )
    if mask or (train is not None and not train):
        return 0.0
    return 1.0 if weight is None else float(weight)


def _no_turns(column: str, row: Row, place: RowLocation) -> DataError:
    if column in row or any(isinstance(value, list) for value in row.values()):
        return wrong_field(column, row.get(column), row, place, "a list of messages")
    return DataError(
        f"the field is missing, and no other column holds a list of messages; the row has {sorted(row)}",
        where=str(place),
        key=column,
        way_out=f"If the row has a question and its answer, set {ATTR_KEY}.formatting=alpaca, {ATTR_KEY}.prompt and "
        f"{ATTR_KEY}.response to the names of their columns.",
    )
