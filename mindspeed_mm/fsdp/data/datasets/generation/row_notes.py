"""What to say at the start of rows that train, but perhaps not as their owner thinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mindspeed_mm.core.counts import by_count
from mindspeed_mm.core.errors import DataError, Problem
from mindspeed_mm.fsdp.data.datasets.generation.media_folders import MEDIA_SUFFIXES, CaptionedFolder
from mindspeed_mm.fsdp.models.diffusion.media_roles import ROLE_COLUMNS

_BASIC = "data.dataset_param.basic_parameters"
_PLACES_SHOWN = 3
_PROBLEMS_SHOWN = 10


def media_columns(extras: Mapping[str, object]) -> list[str]:
    """Columns that a task does not read, are called as media of other tasks, and hold names of pictures or videos."""
    named = ROLE_COLUMNS & extras.keys()
    return [name for name in sorted(named) if Path(str(extras[name])).suffix.lower() in MEDIA_SUFFIXES]


def unread_columns_note(unread: Mapping[str, int], rows: int) -> str:
    """What to say of columns whose media other tasks are given."""
    names, most = ", ".join(sorted(unread)), max(unread.values())
    whose, verb = by_count(len(unread), "a column", "columns"), by_count(most, "has", "have")
    which = by_count(len(unread), "it", "them")
    told = f"{most} of {rows} rows {verb} {whose} {names}, as other tasks call their media; this task does not read"
    return f"{told} {which}"


def empty_captions_note(places: Sequence[str], rows: int) -> str:
    """What to say of rows with an empty caption; nothing where there are none."""
    if not places:
        return ""
    shown = ", ".join(places[:_PLACES_SHOWN])
    if len(places) > _PLACES_SHOWN:
        shown += " …"
    verb = by_count(len(places), "has", "have")
    return f"{len(places)} of {rows} rows {verb} an empty caption ({shown}): trained without one"


def none_fits(count: int, first: DataError, reader: object) -> DataError:
    """The error where none of the first rows can be read."""
    if isinstance(reader, CaptionedFolder):
        (problem,) = first.problems
        what = f"none of the first {count} media can be used; the first: {problem.what}"
        return DataError(what, where=problem.where, way_out=problem.way_out)
    return DataError(
        f"none of the first {count} rows can be read; the first: {first}",
        key=f"{_BASIC}.media_column",
        way_out="Say in media_column and caption_column what holds the media and the captions.",
    )


def all_unusable(faults: Sequence[DataError], total: int) -> DataError:
    """The error where rows are off and none may be left out."""
    problems: list[Problem] = []
    for fault in faults[:_PROBLEMS_SHOWN]:
        problems += fault.problems
    return DataError(
        f"{len(faults)} of {total} rows cannot be used; {_BASIC}.on_bad_sample: skip leaves them out", problems=problems
    )
