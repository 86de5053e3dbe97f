"""Preference rows: one conversation with a better and a worse end.

Both ends may stand beside the messages they answer (LLaMA-Factory: `chosen` and `rejected`, each a message or a text;
TRL: lists of messages after `prompt`), or be whole conversations, told by their beginning with the user's or a system
message, that differ from some message on. Only what differs is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.rows.messages import MESSAGE_COLUMNS, add_messages
from mindspeed_mm.fsdp.data.data_utils.rows.row_fields import ATTR_KEY, Row, first_column, wrong_field
from mindspeed_mm.fsdp.data.data_utils.rows.sources import RowFormat
from mindspeed_mm.fsdp.data.data_utils.sample import REPAIR, RowLocation, Sample

Context = Callable[[Row, RowFormat, RowLocation], Sample]
"""Makes the sample that both answers go on from."""


def convert_pair(row: Row, row_format: RowFormat, place: RowLocation, context: Context) -> tuple[Sample, Sample]:
    """The conversation with the chosen and with the rejected end; media and tools are not placed yet.

    Raises:
        DataError: One is missing, or both are the same.
    """
    chosen, rejected = (_with_answer(row, row_format, place, context, name) for name in ("chosen", "rejected"))
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


def _with_answer(row: Row, row_format: RowFormat, place: RowLocation, context: Context, name: str) -> Sample:
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
    sample = context(row, row_format, place)
    if sample.messages and sample.messages[-1]["role"] == "assistant":
        raise DataError(
            f"the messages before {column} end with a turn of the model, which the answers would only continue",
            where=str(place),
            key=f"message {len(sample.messages) - 1}",
            way_out="End them with what is answered, or give both conversations whole.",
        )
    sample.messages += end.messages
    sample.weights += end.weights
    return sample


def _as_message(answer: str | dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": answer} if isinstance(answer, str) else answer


def prompt_of(row: Row, row_format: RowFormat, place: RowLocation) -> Sample:
    """The messages before the answers: a list of them, or one text of the user.

    Raises:
        DataError: There is nothing before the answers, or it is something else.
    """
    column = first_column(row, row_format.messages, (*MESSAGE_COLUMNS, "prompt"))
    if column is None:
        raise DataError(
            f"nothing comes before the answers; the row has {sorted(row)}",
            where=str(place),
            key=row_format.messages or MESSAGE_COLUMNS[0],
            way_out=f"Name the column of the messages in {ATTR_KEY}.messages, or that of the prompt there.",
        )
    value = row[column]
    if not isinstance(value, str | list):
        raise wrong_field(column, value, row, place, "a text or a list of messages")
    sample = Sample(place)
    add_messages(sample, [{"role": "user", "content": value}] if isinstance(value, str) else value, row_format)
    return sample
