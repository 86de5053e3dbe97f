"""A raw row → a `Sample`: its format is recognised by its columns, and each format gives the same result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.rows.formats import TEXT_COLUMN, RowFormat, recognised
from mindspeed_mm.fsdp.data.data_utils.rows.grounding import COLUMN as OBJECTS
from mindspeed_mm.fsdp.data.data_utils.rows.grounding import read_objects
from mindspeed_mm.fsdp.data.data_utils.rows.media_parts import CLIP, place_media, split_text, take_clip
from mindspeed_mm.fsdp.data.data_utils.rows.messages import (
    add_messages,
    add_system,
    convert_pair,
    from_messages,
    has_role,
)
from mindspeed_mm.fsdp.data.data_utils.rows.row_fields import (
    ATTR_KEY,
    Row,
    note_columns,
    note_paths,
    text_of,
    wrong_field,
)
from mindspeed_mm.fsdp.data.data_utils.rows.turns import check_row_marks, read_tools
from mindspeed_mm.fsdp.data.data_utils.sample import REPAIR, RowLocation, Sample, check_turns, options_of


def convert_row(
    row: Row,
    row_format: RowFormat,
    place: RowLocation,
    *,
    columns: Collection[str] = (),
    rewarded: bool = False,
    draws: bool = False,
) -> Sample:
    """Convert a conversation, a question with its answer, a document, or a pair of answers.

    Args:
        row: The raw row.
        row_format: What is configured, or what was recognised already.
        place: Where the row stands.
        columns: What a data set reads of a row besides.
        rewarded: All columns are handed to rewards.
        draws: The model answers with media, too: placeholders in its turns stand for media.

    Raises:
        DataError: The row does not fit any format; the message names the field and the value.
    """
    row_format = recognised(row, row_format, place)
    if not rewarded:
        check_row_marks(row, place, ranking=bool(row_format.ranking))
    convert = CONVERTERS[row_format.formatting or ""]
    read = {*columns}
    if not row_format.ranking:
        sample = _finished(convert(row, row_format, place), row, row_format, draws)
    else:
        chosen, rejected = convert_pair(row, row_format, place, convert)
        sample = _finished(chosen, row, row_format, draws)
        sample.rejected = _finished(rejected, *_of_rejected(row, row_format), draws)
        read |= {f"rejected_{key}" for key in _OF_REJECTED if row.get(f"rejected_{key}")}
        if sample.rejected.objects is None:
            read.discard(f"rejected_{OBJECTS}")
        for each in sample.rejected.unread:
            sample.note_unread(each)
    read.update(row_format.columns, _further_columns(row, row_format, sample))
    note_columns(sample, row, read, rewarded=rewarded)
    return sample


def convert_text(row: Row, place: RowLocation) -> Sample:
    """Convert a document of plain text: `{"text": …}`.

    Raises:
        DataError: There is no text.
    """
    text = row.get(TEXT_COLUMN)
    if not isinstance(text, str) or not text.strip():
        raise wrong_field(TEXT_COLUMN, text, row, place, "a document of text")
    sample = Sample(place, text=text)
    note_columns(sample, row, (TEXT_COLUMN,))
    return sample


def _finished(sample: Sample, row: Row, row_format: RowFormat, draws: bool) -> Sample:
    """The sample with system prompt, tools and media, its turns checked."""
    if sample.text is not None:
        return sample
    add_system(sample, row, row_format)
    sample.tools = read_tools(row, row_format.tools, sample.place)
    # Before the media: `objects` may number pictures by their place in the row.
    sample.objects = read_objects(row, sample)
    place_media(sample, row, row_format, draws=draws)
    take_clip(sample, row)
    note_paths(sample)
    # Last: `add_system` and the media may still add or move turns.
    check_turns(sample)
    if draws and _draws_unasked(sample):
        sample.notes.append(DRAWN_UNASKED)
    return sample


DRAWN_UNASKED = "a picture is drawn though its turn has no words: nothing says what to draw or to change"


def _draws_unasked(sample: Sample) -> bool:
    """Whether a picture is drawn and trained, for which neither its question nor the answer before it has words."""
    is_told = False
    for message, weight in zip(sample.messages, sample.weights, strict=True):
        is_answer = message["role"] == "assistant"
        is_told = is_told and message["role"] != "user"
        content = message["content"]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        for part in content:
            if part["type"] == "text":
                is_told |= bool(part["text"].strip())
            elif is_answer and weight != 0 and not is_told:
                return True
    return False


_OF_REJECTED = ("images", "videos", "audios", "tools", "objects")


def _of_rejected(row: Row, row_format: RowFormat) -> tuple[Row, RowFormat]:
    """The row as its worse answer has it: with media and tools of its own, where there are any (ms-swift)."""
    own, columns = dict(row), vars(row_format)
    named: JsonObject = {}
    for key in _OF_REJECTED:
        if row.get(f"rejected_{key}"):
            column = columns.get(key) or key
            # Under the column of the chosen answer, so that one converter reads both.
            own[column] = own.pop(f"rejected_{key}")
            if key in columns:
                named[key] = column
    return own, replace(row_format, **named)


def _further_columns(row: Row, row_format: RowFormat, sample: Sample) -> Iterator[str]:
    """Columns that are read of this row, beside those of its format."""
    if isinstance(row.get(row_format.prompt or ""), str):
        yield from filter(None, (row_format.query, row_format.history))  # beside a list of turns they are nothing
    if sample.text is not None:
        yield TEXT_COLUMN
    if sample.objects is not None:
        yield OBJECTS
    if any(options_of(item.source) for item in sample.media):
        yield CLIP


# --- row formats -----------------------------------------------------------------------------------------------------


def from_question(row: Row, row_format: RowFormat, place: RowLocation) -> Sample:
    """A question and its answer in columns of their own: `{"instruction", "input", "output", "history": [[question,
    answer], …], "system"}`, `{"query", "response"}`, `{"prompt", "completion"}` and the like. Question and answer may
    be lists of messages; without a column for it there is no answer."""
    sample = _question(row, row_format, place)
    column = row_format.response
    if not column:
        return sample
    answer = row.get(column)
    turns = [answer]
    if isinstance(answer, list):
        turns = answer
    if turns and isinstance(turns[0], dict) and _is_turn(turns[0], row_format, of_several=turns is answer):
        add_messages(sample, turns, row_format, column)
    elif isinstance(answer, str):
        _add_turn(sample, "assistant", answer)
    else:
        raise wrong_field(column, answer, row, place, "text")
    return sample


def _is_turn(content: Row, row_format: RowFormat, *, of_several: bool) -> bool:
    """Whether an object is a message: it says who speaks. One of a list that is no part of a content is meant as one,
    so that the error names the tags."""
    return has_role(content, row_format) or (of_several and "type" not in content)


def _question(row: Row, row_format: RowFormat, place: RowLocation) -> Sample:
    """Convert everything that stands before the answer: earlier exchanges and the question."""
    sample, prompt = Sample(place), row_format.prompt or ""
    if isinstance(row.get(prompt), list):
        add_messages(sample, row[prompt], row_format, prompt)
        return sample
    texts = list(filter(None, (text_of(row, column, place) for column in (prompt, row_format.query))))
    if not texts:
        raise wrong_field(prompt, row.get(prompt), row, place, "an instruction")
    exchanges: object = ()
    if row_format.history:
        exchanges = row[row_format.history]
    if not isinstance(exchanges, list | tuple):
        raise wrong_field(row_format.history or "", exchanges, row, place, "a list of questions with their answers")
    for pair in exchanges:
        if not _is_exchange(pair):
            what = f"holds {pair!r}, not [question, answer]"
            raise DataError(what, where=str(place), key=row_format.history or "", way_out=REPAIR)
        _add_turn(sample, "user", pair[0])
        _add_turn(sample, "assistant", pair[1])
    _add_turn(sample, "user", "\n".join(texts))
    return sample


def _is_exchange(pair: object) -> bool:
    """Whether it is what was asked and what was answered."""
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return False
    asked, answered = pair
    return isinstance(asked, str) and isinstance(answered, str)


def _add_turn(sample: Sample, role: str, content: str) -> None:
    sample.messages.append({"role": role, "content": split_text(content)})
    sample.weights.append(1.0 if role == "assistant" else None)


def from_transcript(row: Row, row_format: RowFormat, place: RowLocation) -> Sample:
    """`{"audio", "sentence"}`: the sound is all that is asked, and what is said in it the answer."""
    sample, column = Sample(place), row_format.response or ""
    _add_turn(sample, "user", "<audio>")
    if not column:
        return sample
    if not isinstance(row.get(column), str):
        raise wrong_field(column, row.get(column), row, place, "text")
    _add_turn(sample, "assistant", row[column])
    return sample


def from_document(row: Row, row_format: RowFormat, place: RowLocation) -> Sample:
    """`{"text": …}`: all of it is trained."""
    for key in ("images", "videos", "audios"):
        if column := vars(row_format)[key]:
            raise DataError(
                f"the row has a text and {key}, but no turns to show them in",
                where=str(place),
                key=column,
                way_out=f"Write a question and its answer, and name their columns in {ATTR_KEY}.prompt and response.",
            )
    return convert_text(row, place)


Converter = Callable[[Row, RowFormat, RowLocation], Sample]

CONVERTERS: dict[str, Converter] = {
    "sharegpt": from_messages,
    "alpaca": from_question,
    "transcript": from_transcript,
    "text": from_document,
}
"""`formatting` of a recognised format → what converts its rows."""
