"""Rows that the model answers itself: the conversation up to its last turn, and the answer that is held against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.encode import SampleEncoder
from mindspeed_mm.fsdp.data.data_utils.rows.sources import RowFormat
from mindspeed_mm.fsdp.data.data_utils.sample import EncodedPrompt, Sample, count_media

_COLUMNS = ("messages", "conversations", "prompt")


def with_answer(row: JsonObject, row_format: RowFormat, *, needs_answer: bool = False) -> JsonObject:
    """The row with its turns in a list that ends with the model's; a row that lacks an answer gets an empty one, unless
    one is needed. A `prompt` of plain text, with media beside it, becomes such a list."""
    if response := row_format.answer_column:
        return row if needs_answer or row.get(response) is not None else {**row, response: ""}
    if isinstance(row.get("prompt"), str):
        row = _prompt_as_conversation(row)
    names = (row_format.messages, *_COLUMNS)
    column = next((name for name in names if name and isinstance(row.get(name), list)), None)
    if column == "prompt":  # verl's rows
        row, column = {**row, "messages": row["prompt"]}, "messages"
    if needs_answer or column is None or _ends_with_answer(row[column], row_format):
        return row
    return {**row, column: [*row[column], _answer(row[column], row_format)]}


def _answer(turns: list[Any], row_format: RowFormat) -> dict[str, str]:
    """An empty turn of the model, in the words of the other turns."""
    if turns and isinstance(turns[0], dict) and "from" in turns[0]:
        return {"from": "gpt", "value": ""}
    return {"role": "assistant", "content": ""}


def _prompt_as_conversation(row: JsonObject) -> JsonObject:
    prompt, marks = row["prompt"], ""
    media: dict[str, list[Any]] = {}
    for kind in ("image", "video", "audio"):
        named = row.get(f"{kind}s", row.get(kind)) or []
        media[f"{kind}s"] = named if isinstance(named, list) else [named]
        marks += "" if f"<{kind}>" in prompt else f"<{kind}>" * len(media[f"{kind}s"])
    turns = [{"role": "user", "content": marks + prompt}]
    if isinstance(row.get("answer"), str):
        turns.append({"role": "assistant", "content": row["answer"]})
    return {**row, "messages": turns, **media}


def _ends_with_answer(turns: list[Any], row_format: RowFormat) -> bool:
    last = turns[-1] if turns and isinstance(turns[-1], dict) else {}
    role = last.get(row_format.role_tag, last.get("role", last.get("from")))
    return role in (row_format.assistant_tag, "assistant", "gpt")


def encoded_prompt(encoder: SampleEncoder, sample: Sample, index: int, columns: JsonObject) -> EncodedPrompt:
    """A conversation that ends with the model's turn, up to it; that turn's words become the solution.

    Raises:
        DataError: The row is off, or its answer holds media.
    """
    *messages, answer = sample.messages
    media = sample.media[: count_media(messages)]
    if len(media) < len(sample.media):
        raise DataError(
            "the answer holds media, and a model that answers gives words",
            where=str(sample.place),
            key="messages",
            way_out="Leave the media out of the last turn.",
        )
    question = replace(sample, messages=messages, weights=sample.weights[: len(messages)], media=media)
    encoded = encoder.encode_question(question)
    truth, columns = words_of(answer["content"]), dict(columns)
    if truth and columns.get("solution") is None:
        columns["solution"] = truth
    return {
        "sample_id": str(sample.place),
        "row": index,
        "input_ids": encoded.input_ids,
        "media": list(encoded.media),
        "question": question,
        "text": words_of(messages[-1]["content"]) if messages else "",
        "columns": columns,
    }


def collated_prompts(samples: Sequence[EncodedPrompt]) -> Batch:
    """A batch of prompts: they stay as they are until they are answered."""
    return {"prompts": list(samples), "sample_ids": [sample["sample_id"] for sample in samples]}


def words_of(content: str | list[JsonObject]) -> str:
    """The text of a turn, without its media."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)
