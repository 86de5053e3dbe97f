"""Fields of a raw row, and how a wrong one is told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.fsdp.data.data_utils.sample import REPAIR, RowLocation

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


def wrong_field(column: str, value: Any, row: Row, place: RowLocation, expected: str) -> DataError:
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


def not_text(value: Any, where: str, key: str) -> DataError:
    """The error for a value where a text is expected. Numbers are not turned into words: 3 may be the number of a
    choice (MMLU, ScienceQA), and 3.0 the count 3 that a table with gaps holds as a float."""
    way_out = REPAIR
    if value is not None and not isinstance(value, list | tuple | dict | bytes):
        word = str(value).lower() if isinstance(value, bool) else str(value)
        way_out = f"Write the words that are meant as text, such as {short(word)}."
    return DataError(f"{short(value)} is not text", where=where, key=key, way_out=way_out)


def short(value: Any) -> str:
    """A value as shown in messages."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
