"""A raw row → a `Sample`: one converter for each row format, all with the same result."""

from __future__ import annotations

from collections.abc import Callable

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.rows.media_parts import place_media, split_text
from mindspeed_mm.fsdp.data.data_utils.rows.messages import add_system, from_messages
from mindspeed_mm.fsdp.data.data_utils.rows.preference import convert_pair, prompt_of
from mindspeed_mm.fsdp.data.data_utils.rows.row_fields import Row, first_column, text_of, wrong_field
from mindspeed_mm.fsdp.data.data_utils.rows.sources import RowFormat
from mindspeed_mm.fsdp.data.data_utils.rows.tool_calls import read_tools
from mindspeed_mm.fsdp.data.data_utils.sample import REPAIR, RowLocation, Sample
from mindspeed_mm.fsdp.data.data_utils.turns import check_turns


def convert_row(row: Row, row_format: RowFormat, place: RowLocation, *, draws: bool = False) -> Sample:
    """Convert a conversation, or a pair of them.

    Args:
        row: The raw row.
        row_format: Where it keeps what.
        place: Names it in messages.
        draws: The model answers with media, too: placeholders in its turns stand for media.

    Raises:
        DataError: The row does not fit the format; the message names the field and the value.
    """
    convert, context = CONVERTERS[row_format.formatting]
    if not row_format.ranking:
        return _finished(convert(row, row_format, place), row, row_format, draws)
    chosen, rejected = convert_pair(row, row_format, place, context)
    sample = _finished(chosen, row, row_format, draws)
    sample.rejected = _finished(rejected, row, row_format, draws)
    return sample


def convert_text(row: Row, place: RowLocation) -> Sample:
    """Convert a document of plain text: `{"text": …}`.

    Raises:
        DataError: There is no text.
    """
    text = row.get("text")
    if not isinstance(text, str) or not text.strip():
        raise wrong_field("text", text, row, place, "a document of text")
    return Sample(place, text=text)


def _finished(sample: Sample, row: Row, row_format: RowFormat, draws: bool) -> Sample:
    """The sample with system prompt, tools and media, its turns checked."""
    add_system(sample, row, row_format)
    sample.tools = read_tools(row, row_format.tools, sample.place)
    place_media(sample, row, row_format, draws=draws)
    check_turns(sample)
    return sample


# --- row formats -----------------------------------------------------------------------------------------------------


def from_alpaca(row: Row, row_format: RowFormat, place: RowLocation) -> Sample:
    """`{"instruction", "input", "output", "history": [[question, answer], …], "system"}` with configurable names."""
    sample = _alpaca_prompt(row, row_format, place)
    column = row_format.answer_column
    response = row.get(column)
    if not isinstance(response, str):
        raise wrong_field(column, response, row, place, "text")
    _add(sample, "assistant", response)
    return sample


def _alpaca_prompt(row: Row, row_format: RowFormat, place: RowLocation) -> Sample:
    """Everything before the answer."""
    columns = row_format.question_columns
    texts = list(filter(None, (text_of(row, column, place) for column in columns)))
    if not texts:
        raise wrong_field(columns[0], row.get(columns[0]), row, place, "an instruction")
    sample = Sample(place)
    history = first_column(row, row_format.history, ("history",))
    exchanges = row[history] if history else None
    for pair in exchanges or ():
        if not _is_exchange(pair):
            what = f"holds {pair!r}, not [question, answer]"
            raise DataError(what, where=str(place), key=history or "", way_out=REPAIR)
        _add(sample, "user", pair[0])
        _add(sample, "assistant", pair[1])
    _add(sample, "user", "\n".join(texts))
    return sample


def _is_exchange(pair: object) -> bool:
    """Whether it is what was asked and what was answered."""
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return False
    asked, answered = pair
    return isinstance(asked, str) and isinstance(answered, str)


def _add(sample: Sample, role: str, content: str) -> None:
    sample.messages.append({"role": role, "content": split_text(content)})
    sample.weights.append(1.0 if role == "assistant" else None)


Converter = Callable[[Row, RowFormat, RowLocation], Sample]

CONVERTERS: dict[str, tuple[Converter, Converter]] = {
    "sharegpt": (from_messages, prompt_of),
    "multimodal_tool": (from_messages, prompt_of),
    "openai": (from_messages, prompt_of),
    "alpaca": (from_alpaca, _alpaca_prompt),
}
"""`attr.formatting` → what converts a row, and what converts the part before the answers of a preference row."""
