"""Rows with a list of messages (ShareGPT, MLLM, LLaVA, OpenAI, tools) → messages as chat templates take them.

One reader for all of them: a message is an object with a role and a content, under configured names or the two usual
spellings (`from`/`value`, `role`/`content`), or a question with its answer (`human`/`assistant`); OpenAI's further
fields are read wherever they stand.

A preference row is one conversation with a better and a worse end. Both ends may stand beside the messages they answer
(LLaMA-Factory: `chosen` and `rejected`, each a message or a text; TRL: lists of messages after `prompt`), or be whole
conversations, told by their beginning with the user's or a system message, that differ from some message on, or whole
texts (see `transcripts`). The better end may also be the row's own answer (ms-swift: `messages` and `rejected_response`
or `rejected_messages`). Only what differs is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.rows.formats import CALL, PAIRS, RowFormat
from mindspeed_mm.fsdp.data.data_utils.rows.media_parts import (
    OF_TURNS,
    read_parts,
    split_text,
    text_of_part,
    with_own_media,
)
from mindspeed_mm.fsdp.data.data_utils.rows.row_fields import (
    ATTR_KEY,
    Row,
    first_given,
    not_text,
    note_unread,
    short,
    text_of,
    wrong_field,
)
from mindspeed_mm.fsdp.data.data_utils.rows.transcripts import turns_of_texts
from mindspeed_mm.fsdp.data.data_utils.rows.turns import MARKS, read_call_text, read_calls, trains_asked, weight_of
from mindspeed_mm.fsdp.data.data_utils.sample import REPAIR, RowLocation, Sample, Unread

_TAGS = (("role", "content"), ("from", "value"))
_REASONING = ("reasoning_content", "reasoning", "thinking")
_CALLS = ("tool_calls", CALL)
_SPEAKERS = {"user": ("human", "user"), "assistant": ("assistant", "gpt", "bot")}
"""Role → keys of a turn that holds a question and its answer at once (ShareGPT's older rows)."""


def from_messages(row: Row, row_format: RowFormat, place: RowLocation) -> Sample:
    """A row whose messages are a list, with its system prompt in the list or in a column.

    Raises:
        DataError: Naming the message and the field.
    """
    sample = Sample(place)
    add_messages(sample, row[row_format.messages or ""], row_format)
    add_system(sample, row, row_format)
    return sample


def add_system(sample: Sample, row: Row, row_format: RowFormat) -> None:
    """Put the prompt of the system column first, unless the messages have one; another one in the column is noted."""
    system = text_of(row, row_format.system, sample.place)
    if not system:
        return
    content = split_text(system)
    of_turns = [message["content"] for message in sample.messages if message["role"] == "system"]
    if not of_turns:
        sample.messages.insert(0, {"role": "system", "content": content})
        sample.weights.insert(0, None)
    elif content not in of_turns:
        sample.note_unread(Unread("column", str(row_format.system)))


def add_messages(sample: Sample, messages: Sequence[object], row_format: RowFormat, field: str = "message") -> None:
    """Append messages of a row.

    Args:
        sample: To append to.
        messages: As the row has them.
        row_format: Tags.
        field: What to call a message in errors, before its number.
    """
    for number, message in enumerate(messages):
        for each in _exchange(message, row_format):
            read, weight = _message(each, row_format, sample, f"{field} {number}")
            sample.messages.append(read)
            sample.weights.append(weight)


def _exchange(message: object, row_format: RowFormat) -> list[object]:
    """A turn that holds a question and its answer as two turns; marks go with the answer. Any other turn as it is."""
    if not isinstance(message, dict) or not message.keys().isdisjoint((row_format.role_tag, "role", "from")):
        return [message]
    keys = {role: first_given(message, usual) for role, usual in _SPEAKERS.items()}
    if None in keys.values():
        return [message]
    asked, said = keys["user"], keys["assistant"]
    rest = {name: value for name, value in message.items() if name not in (asked, said)}
    turns: list[object] = []
    if system := rest.pop("system", None):
        turns.append({"role": "system", "content": system})
    return [
        *turns,
        {"role": "user", "content": message[asked]},
        {"role": "assistant", "content": message[said], **rest},
    ]


def _message(message: object, row_format: RowFormat, sample: Sample, key: str) -> tuple[JsonObject, float | None]:
    """A message as chat templates take it, and its weight."""
    where = str(sample.place)
    if not isinstance(message, dict):
        raise DataError(f"{short(message)} is not a message", where=where, key=key, way_out=REPAIR)
    role_tag, content_tag = _tags(message, row_format, where, key)
    role = _role(message[role_tag], row_format, where, key)
    content = message.get(content_tag)
    read: JsonObject = {"role": role}
    if role == CALL:
        read = {"role": "assistant", **_spelled_call(content, where, f"{key}.{content_tag}")}
    else:
        lifted = _lifted(content, where, f"{key}.{content_tag}") if role == "assistant" else {}
        content = lifted.pop("content", content)
        calls = _tool_calls(message, where, key) if role == "assistant" else None
        may_be_absent = calls is not None or bool(lifted)
        read["content"] = with_own_media(
            _content(content, may_be_absent, sample, f"{key}.{content_tag}"), message, sample, key
        )
        read |= lifted
        if calls:
            read["tool_calls"] = calls
    if role == "assistant":
        read |= _reasoning(message, where, key)
    if role == "tool":
        for name in _OF_RESULTS:
            if message.get(name) is None:
                continue
            if not isinstance(message[name], str):
                raise not_text(message[name], where, f"{key}.{name}")
            read[name] = message[name]
    note_unread(sample, "turn", message, _known_fields(role, role_tag, content_tag), key)
    weight: float | None = weight_of(message, where, key)
    if read["role"] != "assistant" and weight == 1:
        weight = None
        if asked := trains_asked(message):  # such a turn is trained under `train_on_prompt` alone
            sample.note_unread(Unread("turn", f"{asked}: true of {read['role']}"))
    return read, weight


_OF_RESULTS = ("name", "tool_call_id")
"""Fields of what a tool gave back."""


@lru_cache(maxsize=256)
def _known_fields(role: str, role_tag: str, content_tag: str) -> frozenset[str]:
    """Fields that are read of a turn."""
    of_roles = {"assistant": (*_CALLS, *_REASONING, *OF_TURNS), "tool": (*_OF_RESULTS, *OF_TURNS), CALL: ()}
    return frozenset({role_tag, content_tag, *MARKS, *of_roles.get(role, OF_TURNS)})


def has_role(content: Row, row_format: RowFormat) -> bool:
    """Whether an object says who speaks: then it is a message."""
    return any(role_tag in content for role_tag in (row_format.role_tag, *(role for role, _ in _TAGS)))


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
    if isinstance(tag, str):
        found = row_format.role_of(tag)
        if found is not None:
            return found
    raise DataError(
        f"unknown role {short(tag)}",
        where=where,
        key=key,
        way_out=f"Known: {', '.join(row_format.roles)}. Others: {ATTR_KEY}.user_tag, assistant_tag and so on.",
    )


def _content(content: object, may_be_absent: bool, sample: Sample, key: str) -> str | list[JsonObject]:
    if isinstance(content, list):
        return read_parts(content, sample, key)
    if content is None and may_be_absent:
        return ""
    if not isinstance(content, str):
        raise not_text(content, str(sample.place), key)
    return split_text(content)


_THOUGHTS, _CALL_PARTS = ("reasoning", "thinking"), ("tool_call",)


def _lifted(content: object, where: str, key: str) -> JsonObject:
    """Thoughts and calls that stand among the parts of an answer (LLaMA-Factory v1) under the names that chat templates
    have for them, and the other parts as the content; empty where there are none."""
    if not isinstance(content, list):
        return {}
    thoughts, calls, rest = list[str](), list[JsonObject](), list[Any]()
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        at = f"{key}[{number}]"
        if kind in _THOUGHTS:
            thoughts.append(text_of_part({"text": part.get(str(kind)), **part}, where, at))
        elif kind in _CALL_PARTS:
            calls += _spelled_call(part.get("value", part.get("tool_call")), where, at)["tool_calls"]
        else:
            rest.append(part)
    lifted: JsonObject = {"reasoning_content": "".join(thoughts)} if thoughts else {}
    if calls:
        lifted["tool_calls"] = calls
    if lifted:
        return {**lifted, "content": rest or None}
    return {}


def _tool_calls(message: Row, where: str, key: str) -> list[JsonObject] | None:
    """The calls of a turn of the model, in OpenAI's form of today or of old (`function_call`)."""
    for name in _CALLS:
        if message.get(name) not in (None, "", [], {}):
            return read_calls(message[name], where, f"{key}.{name}")
    return None


def _spelled_call(content: object, where: str, key: str) -> JsonObject:
    if isinstance(content, dict | list) and content:
        return {"content": "", "tool_calls": read_calls(content, where, key)}
    if not isinstance(content, str):
        raise not_text(content, where, key)
    reasoning, said, calls = read_call_text(content, where, key)
    thought = {"reasoning_content": reasoning} if reasoning else {}
    return {"content": split_text(said), "tool_calls": calls, **thought}


def _reasoning(message: Row, where: str, key: str) -> dict[str, str]:
    name = first_given(message, _REASONING)
    if name is None:
        return {}
    if not isinstance(message[name], str):
        raise not_text(message[name], where, f"{key}.{name}")
    if message[name]:
        return {"reasoning_content": message[name]}
    return {}


# --- preference pairs -------------------------------------------------------------------------------------------------


Convert = Callable[[Row, RowFormat, RowLocation], Sample]
"""Converts a row without its `chosen` and `rejected` columns."""


def convert_pair(row: Row, row_format: RowFormat, place: RowLocation, convert: Convert) -> tuple[Sample, Sample]:
    """The conversation with the chosen and with the rejected end; media and tools are not placed yet.

    Args:
        row: The raw row.
        row_format: Recognised.
        place: Where the row stands.
        convert: What its format is read by.

    Raises:
        DataError: One is missing, or both are the same.
    """
    texts = _whole_texts(row, row_format, place)
    if texts is not None:
        chosen, rejected = texts
    elif row_format.chosen:
        chosen = _with_answer(row, row_format, place, convert, "chosen")
    elif row_format.rejected and _has_own_answer(row_format):
        chosen = convert(row, row_format, place)
    else:
        raise wrong_field(PAIRS["chosen"][0], None, row, place, "an answer")
    if texts is None:
        rejected = _with_answer(row, row_format, place, convert, "rejected")
    differ = 0
    """Number of the first message that is another one."""
    for one, other in zip(chosen.messages, rejected.messages, strict=False):
        if one != other:
            break
        differ += 1
    if differ == max(len(chosen.messages), len(rejected.messages)):
        raise DataError("chosen and rejected are the same", where=str(place), key="rejected", way_out=REPAIR)
    for sample in (chosen, rejected):
        if differ >= len(sample.messages):
            raise DataError(
                "chosen and rejected must both end with an answer, and one is the beginning of the other",
                where=str(place),
                key="rejected",
                way_out=REPAIR,
            )
        for i, weight in enumerate(sample.weights[:differ]):
            if weight is not None:
                sample.weights[i] = 0.0
    return chosen, rejected


def _whole_texts(row: Row, row_format: RowFormat, place: RowLocation) -> tuple[Sample, Sample] | None:
    """Both conversations of a row without a prompt whose answers are whole texts; None: it is another row."""
    columns = (row_format.chosen or "", row_format.rejected or "")
    if row_format.messages or row_format.prompt or not all(isinstance(row.get(name), str) for name in columns):
        return None
    if not all(row[name].strip() for name in columns):
        return None
    better, worse, note = turns_of_texts(row, columns, row_format.columns, place)
    chosen, rejected = Sample(place), Sample(place)
    for sample, turns, column in ((chosen, better, columns[0]), (rejected, worse, columns[1])):
        add_messages(sample, turns, row_format, column)
        if not sample.messages[-1]["content"]:
            raise DataError("the answer is empty", where=str(place), key=column, way_out=REPAIR)
        sample.notes += [note] if note else []
    return chosen, rejected


def _has_own_answer(row_format: RowFormat) -> bool:
    return bool(row_format.response) or row_format.holds_turns


def _with_answer(row: Row, row_format: RowFormat, place: RowLocation, convert: Convert, name: str) -> Sample:
    column = getattr(row_format, name) or name
    answer = row.get(column)
    if answer is None or answer in ("", []) or not isinstance(answer, str | dict | list):
        raise wrong_field(column, answer, row, place, "an answer: a text, a message or a list of messages")
    end = Sample(place)
    add_messages(end, answer if isinstance(answer, list) else [_as_message(answer)], row_format, column)
    last = end.messages[-1]
    if not last["content"] and not last.get("tool_calls"):
        raise DataError("the answer is empty", where=str(place), key=column, way_out=REPAIR)
    if end.messages[0]["role"] in ("system", "user"):
        return end  # a whole conversation
    sample = _context(row, row_format, place, convert)
    if sample.messages and sample.messages[-1]["role"] == "assistant":
        raise DataError(
            f"the messages before {column} end with a turn of the model, which the answers would only continue",
            where=str(place),
            key=f"message {len(sample.messages) - 1}",
            way_out="End them with what is answered, or give both conversations whole.",
        )
    sample.messages += end.messages
    sample.weights += end.weights
    for each in end.unread:
        sample.note_unread(each)
    return sample


def _as_message(answer: str | JsonObject) -> JsonObject:
    if isinstance(answer, str):
        return {"role": "assistant", "content": answer}
    return answer


def _context(row: Row, row_format: RowFormat, place: RowLocation, convert: Convert) -> Sample:
    """What comes before an answer.

    Raises:
        DataError: Nothing does.
    """
    if not (row_format.messages or row_format.prompt):
        raise DataError(
            f"nothing comes before the answers; the row has {sorted(row)}",
            where=str(place),
            key=row_format.messages or "messages",
            way_out=f"Name the column of the messages in {ATTR_KEY}.messages, or of the prompt in {ATTR_KEY}.prompt.",
        )
    sample = convert(row, row_format, place)
    if row_format.chosen:
        return sample
    # The row's own answer is the better one: what it answers ends with the user's last turn.
    roles = [message["role"] for message in sample.messages]
    end = len(roles) - roles[::-1].index("user") if "user" in roles else 0
    del sample.messages[end:], sample.weights[end:]
    return sample
