"""Preference rows: one conversation with a better and a worse end.

Both ends may stand beside the messages they answer (LLaMA-Factory: `chosen` and `rejected`, each a message or a text;
TRL: lists of messages after `prompt`), or be whole conversations, told by their beginning with the user's or a system
message, that differ from some message on. The better end may also be the row's own answer (ms-swift: `messages` and
`rejected_response` or `rejected_messages`). Only what differs is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.rows.formats import PAIRS, RowFormat
from mindspeed_mm.fsdp.data.data_utils.rows.messages import add_messages
from mindspeed_mm.fsdp.data.data_utils.rows.row_fields import ATTR_KEY, Row, wrong_field
from mindspeed_mm.fsdp.data.data_utils.sample import REPAIR, RowLocation, Sample

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
    if row_format.chosen:
        chosen = _with_answer(row, row_format, place, convert, "chosen")
    elif row_format.rejected and _has_own_answer(row_format):
        chosen = convert(row, row_format, place)
    else:
        raise wrong_field(PAIRS["chosen"][0], None, row, place, "an answer")
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


def _as_message(answer: str | dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": answer} if isinstance(answer, str) else answer


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
