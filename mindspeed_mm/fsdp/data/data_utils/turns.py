"""The order of turns: which conversations are trained or answered, and how turns of one speaker become one.

Chat templates differ in what they take: most write two messages of one speaker as two turns, some refuse them. So the
messages stay as a row has them wherever its template writes all of them; `joined` is for templates that do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.sample import REPAIR, Sample

Message = dict[str, Any]
Weights = list[float | None]
_BREAK = "\n\n"
"""Between the texts of two messages that become one, as Mistral's reference tokenizer (mistral-common) joins them."""
_JOINED = frozenset({"system", "user", "assistant"})
"""Results of tools are never joined: each answers a call of its own."""


def check_turns(sample: Sample) -> None:
    """Raise unless somebody asks, the model answers last, and results of tools follow the model.

    Raises:
        DataError: Naming the message.
    """
    where = str(sample.place)
    roles = [message["role"] for message in sample.messages]
    if "assistant" not in roles:
        raise DataError(
            "no trainable token: the conversation has no turn of the model", where=where, key="messages", way_out=REPAIR
        )
    if roles[-1] != "assistant":
        raise DataError(
            f"the last turn is the {roles[-1]}'s: nothing answers it", where=where, key="messages", way_out=REPAIR
        )
    if "user" not in roles:
        raise DataError(
            "the conversation has no turn of the user: nothing is asked", where=where, key="messages", way_out=REPAIR
        )
    for number, (before, role) in enumerate(pairwise(["", *roles])):
        if role == "tool" and before not in ("assistant", "tool"):
            raise DataError(
                f"a result of a tool follows {f'the turn of the {before}' if before else 'nothing'}",
                where=where,
                key=f"message {number}",
                way_out="Results of tools follow the turn of the model that calls them.",
            )


def is_usual(messages: Sequence[Message]) -> bool:
    """Whether turns alternate after at most one system message, tools answering calls: every chat template takes it."""
    before = "system"
    for number, message in enumerate(messages):
        role = message["role"]
        if role == "system" and number == 0:
            continue
        if role not in _FOLLOWERS[before]:
            return False
        before = "call" if message.get("tool_calls") else role
    return True


_FOLLOWERS = {
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "call": ("tool", "user"),
    "tool": ("assistant", "tool"),
}
"""Kind of turn → the kinds that usually follow it."""


def joined(messages: Sequence[Message], weights: Sequence[float | None]) -> tuple[list[Message], Weights]:
    """The conversation with neighbouring messages of one speaker as one, two line breaks between their texts. Messages
    that count differently in the loss stay apart.

    Args:
        messages: As `Sample` has them.
        weights: Of each message.
    """
    kept: list[Message] = []
    counts: Weights = []
    for message, weight in zip(messages, weights, strict=True):
        if kept and message["role"] in _JOINED and kept[-1]["role"] == message["role"] and counts[-1] == weight:
            kept[-1] = _one(kept[-1], message)
        else:
            kept.append(message)
            counts.append(weight)
    return kept, counts


def _one(first: Message, second: Message) -> Message:
    message: Message = {**first, **second, "content": _contents(first["content"], second["content"])}
    thoughts = [part["reasoning_content"] for part in (first, second) if part.get("reasoning_content")]
    if thoughts:
        message["reasoning_content"] = _BREAK.join(thoughts)
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    if calls:
        message["tool_calls"] = calls
    return message


def _contents(first: str | list[Message], second: str | list[Message]) -> str | list[Message]:
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return first + _BREAK + second
    return [*_parts(first), {"type": "text", "text": _BREAK}, *_parts(second)]


def _parts(content: str | list[Message]) -> list[Message]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def words_said(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message, without blanks around them and without thoughts, which templates may leave out."""
    texts = []
    for part in _parts(message["content"]):
        texts.append(part.get("text", "").rpartition("</think>")[2].strip())
    return [text for text in texts if text]
