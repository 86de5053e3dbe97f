"""A raw row → a `Sample`: one converter for each row format, all with the same result."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem, Place, Sample
from mindspeed_mm.fsdp.data.data_utils.sources import RowFormat

Row = Mapping[str, Any]

_PLACEHOLDER = re.compile(r"<(image|video|audio)>")
_MESSAGE_COLUMNS = ("conversations", "messages")
_TOOL_ROLES = frozenset({"tool", "function", "observation", "function_call"})
_ATTR_KEY = "data.dataset_param.attr"


def convert_row(row: Row, row_format: RowFormat, place: Place) -> Sample:
    """Convert a conversation.

    Raises:
        DataError: The row does not fit the format; the message names the field and the value.
        ConfigError: The format, or a modality in the row, is not built yet.
    """
    converter = CONVERTERS.get(row_format.formatting)
    if converter is None:
        raise ConfigError(
            f"'{row_format.formatting}' rows are not built yet",
            key=f"{_ATTR_KEY}.formatting",
            way_out=f"Built: {', '.join(sorted(CONVERTERS))}.",
        )
    sample = converter(row, row_format, place)
    _refuse_unbuilt_media(row, row_format, place)
    sample.media = [
        MediaItem("image", source) for source in _media_list(row, row_format.images, ("images", "image"), place)
    ]
    _place_media(sample)
    _check_turns(sample)
    return sample


def convert_text(row: Row, place: Place) -> Sample:
    """Convert a document of plain text: `{"text": …}`.

    Raises:
        DataError: There is no text.
    """
    text = row.get("text")
    if not isinstance(text, str) or not text.strip():
        raise _wrong("text", text, row, place, "a document of text")
    return Sample(place, text=text)


# --- row formats -----------------------------------------------------------------------------------------------------


def from_sharegpt(row: Row, row_format: RowFormat, place: Place) -> Sample:
    """`{"conversations": [{"from", "value"}]}` with configurable names; `{"messages": [{"role", "content"}]}` and
    LLaVA's rows are recognised as they are."""
    column = _message_column(row, row_format)
    turns = row.get(column) if column else None
    if not isinstance(turns, list):
        raise _wrong(column or row_format.messages or _MESSAGE_COLUMNS[0], turns, row, place, "a list of messages")
    sample = Sample(place)
    for number, turn in enumerate(turns):
        _add_turn(sample, turn, number, row_format)
    system = row.get(row_format.system or "system")
    if isinstance(system, str) and system and not any(m["role"] == "system" for m in sample.messages):
        sample.messages.insert(0, {"role": "system", "content": system})
        sample.weights.insert(0, 0.0)
    return sample


def from_alpaca(row: Row, row_format: RowFormat, place: Place) -> Sample:
    """`{"instruction", "input", "output", "history": [[question, answer], …], "system"}` with configurable names."""
    prompt = _text(row, row_format.prompt or "instruction", place)
    query = _text(row, row_format.query or "input", place, optional=True)
    response = _text(row, row_format.response or "output", place)
    system = _text(row, row_format.system or "system", place, optional=True)
    sample = Sample(place)
    if system:
        _add(sample, "system", system)
    for pair in row.get(row_format.history or "history") or []:
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise DataError(f"history holds {pair!r}, not [question, answer]", where=str(place), key="history")
        _add(sample, "user", pair[0])
        _add(sample, "assistant", pair[1])
    _add(sample, "user", "\n".join(part for part in (prompt, query) if part))
    _add(sample, "assistant", response)
    return sample


CONVERTERS: dict[str, Callable[[Row, RowFormat, Place], Sample]] = {
    "sharegpt": from_sharegpt,
    "alpaca": from_alpaca,
}
"""`attr.formatting` → converter."""


# --- turns -----------------------------------------------------------------------------------------------------------


def _message_column(row: Row, row_format: RowFormat) -> str | None:
    if row_format.messages in row:
        return row_format.messages
    return next((name for name in _MESSAGE_COLUMNS if name in row), None)


def _add(sample: Sample, role: str, content: str, trained: bool | None = None) -> None:
    sample.messages.append({"role": role, "content": content})
    sample.weights.append(float(role == "assistant" if trained is None else trained))


def _add_turn(sample: Sample, turn: Any, number: int, row_format: RowFormat) -> None:
    where, field = str(sample.place), f"message {number}"
    if not isinstance(turn, dict):
        raise DataError(f"{_short(turn)} is no message", where=where, key=field)
    role_tag, content_tag = _tags(turn, row_format)
    if role_tag not in turn or content_tag not in turn:
        raise DataError(
            f"has the fields {sorted(turn)}, not '{row_format.role_tag}' and '{row_format.content_tag}'",
            where=where,
            key=field,
            way_out=f"Set {_ATTR_KEY}.role_tag and content_tag.",
        )
    role, content = _role(turn[role_tag], row_format, where, field), turn[content_tag]
    if isinstance(content, list):
        raise ConfigError(
            "messages with a list of typed parts are not built yet",
            where=where,
            key=f"{_ATTR_KEY}.formatting",
            way_out="Write the text with <image> placeholders and list the images beside it.",
        )
    if not isinstance(content, str):
        raise DataError(f"{_short(content)} is not text", where=where, key=f"{field}.{content_tag}")
    _add(sample, role, content, trained=_is_trained(turn, role, where, field))


def _tags(turn: Row, row_format: RowFormat) -> tuple[str, str]:
    """Configured tags, else those of the two usual spellings."""
    for role_tag, content_tag in (
        (row_format.role_tag, row_format.content_tag),
        ("role", "content"),
        ("from", "value"),
    ):
        if role_tag in turn and content_tag in turn:
            return role_tag, content_tag
    return row_format.role_tag, row_format.content_tag


def _role(tag: Any, row_format: RowFormat, where: str, field: str) -> str:
    roles = _role_words(row_format)
    if isinstance(tag, str) and tag in roles:
        return roles[tag]
    if tag in _TOOL_ROLES:
        raise ConfigError(
            f"'{tag}' turns are not built yet", where=where, key=field, way_out="Take the rows with tool calls out."
        )
    raise DataError(f"unknown role {_short(tag)}", where=where, key=field, way_out=f"Known: {', '.join(roles)}.")


@lru_cache(maxsize=16)
def _role_words(row_format: RowFormat) -> dict[str, str]:
    words = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
    configured = {
        row_format.user_tag: "user",
        row_format.assistant_tag: "assistant",
        row_format.system_tag: "system",
    }
    return words | configured


def _is_trained(turn: Row, role: str, where: str, field: str) -> bool:
    """Whether the turn's tokens are trained: the model's turns are, unless `train: false` or `weight: 0` says no."""
    weight, train = turn.get("weight"), turn.get("train", turn.get("trainable"))
    if weight is not None and weight not in (0, 1):
        raise DataError(f"weight {_short(weight)} is neither 0 nor 1", where=where, key=f"{field}.weight")
    if train is not None and not isinstance(train, bool):
        raise DataError(f"train {_short(train)} is neither true nor false", where=where, key=f"{field}.train")
    return role == "assistant" and weight != 0 and train is not False


def _check_turns(sample: Sample) -> None:
    """Raise unless user and model take turns, the user first and the model last."""
    roles = [message["role"] for message in sample.messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    where = str(sample.place)
    if "assistant" not in turns:
        raise DataError("no trainable token: the conversation has no turn of the model", where=where, key="messages")
    for number, (role, expected) in enumerate(zip(turns, ("user", "assistant") * len(turns), strict=False)):
        if role != expected:
            raise DataError(
                f"turn {number + 1} is the {role}'s where the {expected}'s is due",
                where=where,
                key="messages",
                way_out="User and model take turns, after at most one system message.",
            )
    if turns[-1] != "assistant":
        raise DataError("the last turn is the user's: nothing answers it", where=where, key="messages")


# --- fields ----------------------------------------------------------------------------------------------------------


def _text(row: Row, column: str, place: Place, optional: bool = False) -> str:
    value = row.get(column)
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        raise _wrong(column, value, row, place, "text")
    return value


def _media_list(row: Row, column: str | None, usual: tuple[str, ...], place: Place) -> list[Any]:
    name = column if column else next((name for name in usual if row.get(name) is not None), usual[0])
    value = row.get(name)
    if value is None:
        return []
    items = list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(item, str | bytes | dict) for item in items):
        raise DataError(f"{_short(value)} is not a list of media", where=str(place), key=name)
    return items


def _refuse_unbuilt_media(row: Row, row_format: RowFormat, place: Place) -> None:
    for kind, column in (("videos", row_format.videos), ("audios", row_format.audios)):
        if _media_list(row, column, (kind, kind.removesuffix("s")), place):
            raise ConfigError(
                f"{kind} are not built yet", where=str(place), key=f"{_ATTR_KEY}.{kind}", way_out="Take such rows out."
            )


def _place_media(sample: Sample) -> None:
    """Turn placeholders into typed parts, and check that there is one media entry for each."""
    counts = {"image": 0, "video": 0, "audio": 0}
    for message in sample.messages:
        content = message["content"]
        if "<" in content and _PLACEHOLDER.search(content):
            message["content"] = _split(content, counts)
    given = {"image": len(sample.media), "video": 0, "audio": 0}
    for kind, count in counts.items():
        if count != given[kind]:
            raise DataError(
                f"{count} <{kind}> placeholders in the text, but {given[kind]} {kind}s",
                where=str(sample.place),
                key=f"{kind}s",
                way_out="Write one placeholder for each, in the same order.",
            )


def _split(content: str, counts: dict[str, int]) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(_PLACEHOLDER.split(content)):
        if number % 2:
            counts[piece] += 1
            parts.append({"type": piece})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


def _wrong(column: str, value: Any, row: Row, place: Place, expected: str) -> DataError:
    if column not in row:
        return DataError(
            f"the field is missing; the row has {sorted(row)}",
            where=str(place),
            key=column,
            way_out=f"Name the column in {_ATTR_KEY}.",
        )
    return DataError(f"{_short(value)} is not {expected}", where=str(place), key=column)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
