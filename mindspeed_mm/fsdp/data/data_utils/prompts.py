"""Rows that the model answers itself: the conversation up to its last turn, and the answer that is held against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.encode import SampleEncoder
from mindspeed_mm.fsdp.data.data_utils.rows.formats import RowFormat, recognised
from mindspeed_mm.fsdp.data.data_utils.sample import MEDIA_KINDS, EncodedPrompt, RowLocation, Sample, count_media


def with_answer(
    row: JsonObject, row_format: RowFormat, place: RowLocation, *, needs_answer: bool = False
) -> tuple[JsonObject, RowFormat]:
    """The row with the model's turn at its end, an empty one where the row has none, and its recognised format. With
    `needs_answer` the row as it is.

    Raises:
        DataError: No format fits.
    """
    row_format = recognised(row, row_format, place, needs_answer=needs_answer)
    if row_format.formatting == "text":
        what, way_out = "the row is a document, and asks nothing", "Give rows with a question."
        raise DataError(what, where=str(place), key="text", way_out=way_out)
    if needs_answer or row_format.ranking:
        return row, row_format
    if row_format.holds_turns:
        column = row_format.messages or ""
        if _ends_with_answer(row[column], row_format):
            return row, row_format
        return {**row, column: [*row[column], _answer(row[column], row_format)]}, row_format
    asked, answer = row_format.prompt or "", row.get(row_format.response or "")
    # Without an answer nothing tells how media and marks match: missing marks go before the question.
    if asked and isinstance(row[asked], str):  # a transcript asks nothing but its sound
        row = {**row, asked: _marks(row, row_format) + row[asked]}
    if isinstance(answer, str | list | dict) and row_format.response:
        is_turn = isinstance(answer, str) or not isinstance(answer, list) or isinstance(answer[:1] and answer[0], dict)
        if is_turn:
            return row, row_format
    return {**row, _ANSWER: ""}, replace(row_format, response=_ANSWER)


_ANSWER = "\0answer"
"""A column that no row has."""


def _answer(turns: Sequence[object], row_format: RowFormat) -> dict[str, str]:
    """An empty turn of the model, in the words of the other turns."""
    if turns and isinstance(turns[0], dict) and "from" in turns[0]:
        return {"from": "gpt", "value": ""}
    return {"role": "assistant", "content": ""}


def _marks(row: JsonObject, row_format: RowFormat) -> str:
    """Marks of the media that no text of a question marks."""
    texts = [row.get(name) for name in (row_format.prompt, row_format.query) if name]
    said, marks = "".join(text for text in texts if isinstance(text, str)), ""
    if row_format.history:
        return ""
    for kind in MEDIA_KINDS:
        named = row.get(vars(row_format)[f"{kind}s"] or "") or []
        if f"<{kind}>" not in said:
            count = 1
            if isinstance(named, list):
                count = len(named)
            marks += f"<{kind}>" * count
    return marks


def _ends_with_answer(turns: Sequence[object], row_format: RowFormat) -> bool:
    last: JsonObject = {}
    if turns and isinstance(turns[-1], dict):
        last = turns[-1]
    role = last.get(row_format.role_tag, last.get("role", last.get("from")))
    if role is None:
        return any(key in last for key in ("assistant", "gpt", "bot"))
    return isinstance(role, str) and row_format.role_of(role) == "assistant"


def question_of_prompt(sample: Sample) -> Sample:
    """A conversation that ends with the model's turn, without that turn.

    Raises:
        DataError: The answer holds media.
    """
    messages = sample.messages[:-1]
    media = sample.media[: count_media(messages)]
    if len(media) < len(sample.media):
        raise DataError(
            "the answer holds media, and a model that answers gives words",
            where=str(sample.place),
            key="messages",
            way_out="Leave the media out of the last turn.",
        )
    return replace(sample, messages=messages, weights=sample.weights[: len(messages)], media=media)


def encoded_prompt(encoder: SampleEncoder, sample: Sample, index: int, columns: JsonObject) -> EncodedPrompt:
    """A conversation that ends with the model's turn, up to it; that turn's words become the solution.

    Raises:
        DataError: The row is off, or its answer holds media.
    """
    question, answer = question_of_prompt(sample), sample.messages[-1]
    messages = question.messages
    encoded = encoder.encode_question(question)
    truth, columns = words_of(answer["content"]), dict(columns)
    if truth and columns.get("solution") is None:
        # Rewards read `solution`: the row's own column wins over the words of its answer.
        columns["solution"] = truth
    text = ""
    if messages:
        text = words_of(messages[-1]["content"])
    return {
        "sample_id": str(sample.place),
        "row": index,
        "input_ids": encoded.input_ids,
        "media": list(encoded.media),
        "question": question,
        "text": text,
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
