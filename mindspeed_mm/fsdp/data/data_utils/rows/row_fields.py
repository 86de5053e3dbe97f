"""Fields of a raw row, of its turns and parts: how a wrong one is told, and those that nothing reads: which are
harmless, which are refused, and the rest, reported.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.fsdp.data.data_utils.sample import REPAIR, RowLocation, Sample, Unread

Row = Mapping[str, Any]

ATTR_KEY = "data.dataset_param.attr"


def first_column(row: Row, configured: str | None, usual: tuple[str, ...]) -> str | None:
    """The column that holds a field: the configured one; where none is, or it is one of the usual, any usual one.

    Args:
        row: The raw row.
        configured: Name from `attr`; None: not given; empty: the rows have no such field.
        usual: Names that are recognised as they are, the likeliest first.
    """
    names = usual
    if configured is not None:
        names = (configured, *usual) if configured in usual else (configured,)
    return first_given(row, filter(None, names))


def first_given(row: Row, names: Iterable[str]) -> str | None:
    """The first of these keys that is there and not null."""
    for name in names:
        if row.get(name) is not None:
            return name
    return None


def text_of(row: Row, column: str | None, place: RowLocation) -> str:
    """The text of a column; empty where there is none.

    Raises:
        DataError: It is something else than text.
    """
    value = row.get(column) if column else None
    if value is None:
        return ""
    if not isinstance(value, str):
        raise wrong_field(column or "", value, row, place, "text")
    return value


def parsed_json(text: str, where: str, key: str) -> Any:
    """JSON inside a field.

    Raises:
        DataError: It is not JSON.
    """
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{short(text)} is not JSON: {error}", where=where, key=key, way_out=REPAIR) from error


def wrong_field(column: str, value: object, row: Row, place: RowLocation, expected: str) -> DataError:
    """The error for a field that is missing or not what is expected."""
    if column not in row:
        return DataError(
            f"the field is missing; the row has {sorted(row)}",
            where=str(place),
            key=column,
            way_out=f"Name the column in {ATTR_KEY}.",
        )
    if expected == "text":
        return not_text(value, str(place), column)
    return DataError(f"{short(value)} is not {expected}", where=str(place), key=column, way_out=REPAIR)


def not_text(value: object, where: str, key: str) -> DataError:
    """The error for a value where a text is expected. Numbers are not turned into words: 3 may be the number of a
    choice (MMLU, ScienceQA), and 3.0 the count 3 that a table with gaps holds as a float."""
    way_out = REPAIR
    if value is not None and not isinstance(value, list | tuple | dict | bytes):
        word = str(value).lower() if isinstance(value, bool) else str(value)
        way_out = f"Write the words that are meant as text, such as {short(word)}."
    return DataError(f"{short(value)} is not text", where=where, key=key, way_out=way_out)


def short(value: object) -> str:
    """A value as shown in messages."""
    text = repr(value)
    if len(text) <= 60:
        return text
    return f"{text[:57]}..."


_METADATA = frozenset(
    {
        "_id", "ability", "annotator", "author", "category", "channel", "comment", "created", "created_at", "data_id",
        "data_source", "dataset", "dataset_name", "date", "difficulty", "domain", "extra", "extra_info", "file_name",
        "filename", "generator", "hash", "height", "height_list", "id", "idx", "index", "info", "key", "lang",
        "language", "length", "level", "license", "md5", "meta", "metadata", "model", "model_name", "n_tokens", "note",
        "notes", "num_tokens", "origin", "original_id", "qid", "question_type", "round", "sha256", "source", "split",
        "src", "subject", "subset", "subtask", "tag", "tags", "task", "task_name", "task_type", "time", "timestamp",
        "token_count", "topic", "turn", "uid", "update_time", "updated_at", "url", "user_id", "uuid", "version",
        "width", "width_list",
    }
)  # fmt: skip
"""Names of fields that describe a row or a turn and change neither what is learned nor what is seen."""
_METADATA_ENDS = ("_id", "_ids", "_idx", "_index", "_uuid", "_url")
_CHANGE_VIEW = frozenset({"chat_template_kwargs", "clip", "enable_thinking", "mm_processor_kwargs", "objects"})
"""Columns that other tools show the model in another way for; rewards reading them does not make them obeyed."""


def is_metadata(name: str) -> bool:
    """Whether a field of this name is known to describe its row or turn only."""
    lower = name.lower()
    return lower in _METADATA or lower.endswith(_METADATA_ENDS)


def unread_fields(holder: Mapping[Any, Any], known: Collection[str]) -> Iterator[str]:
    """Names of fields that hold something, that nothing reads, and that are not known to be harmless."""
    for name, value in holder.items():
        if name in known or value is None or (isinstance(value, str | list | tuple | dict) and not len(value)):
            continue
        if not is_metadata(str(name)):
            yield str(name)


def note_unread(sample: Sample, level: str, holder: Mapping[Any, Any], known: Collection[str], key: str) -> None:
    """Note the fields of a turn or a part that nothing reads.

    Raises:
        DataError: One is a boolean or a number, which may be a mark that says what is trained or seen.
    """
    for name in unread_fields(holder, known):
        value = holder[name]
        if isinstance(value, bool | int | float):
            raise DataError(
                f"'{name}' {short(value)} of a {level} is not known, and it may say what is trained or seen",
                where=str(sample.place),
                key=f"{key}.{name}",
                way_out="Take it out, or write a mark that is known: train, loss, mask, weight (see docs/data.md).",
            )
        sample.note_unread(Unread(level, name))


def unread_told(counts: Mapping[str, int], where: str) -> str:
    """A line about what is not read, the most frequent first.

    Args:
        counts: What it is → in how many rows.
        where: Which rows were looked at.
    """
    ordered = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    shown = ", ".join(f"{name} ({rows:,})" for name, rows in ordered[:_MOST_SHOWN])
    more = f" and {len(ordered) - _MOST_SHOWN} more" if len(ordered) > _MOST_SHOWN else ""
    return f"not read in {where}: {shown}{more}; mm data check names the rows"


_MOST_SHOWN = 6


def note_columns(sample: Sample, row: Row, read: Collection[str], *, rewarded: bool = False) -> None:
    """Note the columns of a row that nothing reads.

    Args:
        sample: What the row became.
        row: The row.
        read: Columns that its format reads.
        rewarded: All columns are handed to rewards, so that only those are noted that would change what is seen.
    """
    for name in unread_fields(row, read):
        if not rewarded or name in _CHANGE_VIEW:
            sample.note_unread(Unread("column", name))


_IN_TEXT = re.compile(
    r"<(?P<tag>img|image|video|audio)>(?P<path>[^<>\n]{1,1000})</(?P=tag)>|!\[[^\]\n]*\]\((?P<link>[^()\s]{1,1000})\)"
    r"|(?P<box><bbox>|<ref-object>)"
)
"""`<img>path</img>` as Qwen-VL's rows have it, `<audio>path</audio>` as Qwen-Audio's, a picture of Markdown, and
the marks that ms-swift fills from `objects`."""


def note_paths(sample: Sample) -> None:
    """Note media that are written into a text, where they are words, and marks of boxes that no `objects` fill."""
    for message in sample.messages:
        content = message["content"]
        texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        for text in texts:
            if "<" not in text and "![" not in text:
                continue
            for found in _IN_TEXT.finditer(text):
                tag = found["tag"]
                if found["box"] and sample.objects is None:
                    sample.note_unread(Unread("text", found["box"]))
                elif not found["box"]:
                    sample.note_unread(Unread("text", f"<{tag}>…</{tag}>" if tag else "![…](…)"))
