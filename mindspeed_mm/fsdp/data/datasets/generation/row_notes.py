"""What to say at the start of rows that train, but perhaps not as their owner thinks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mindspeed_mm.core.counts import by_count
from mindspeed_mm.core.errors import DataError, Problem
from mindspeed_mm.fsdp.data.datasets.generation.media_folders import MEDIA_SUFFIXES, CaptionedFolder
from mindspeed_mm.fsdp.data.datasets.generation.row import CAPTION_COLUMNS
from mindspeed_mm.fsdp.models.diffusion.media_roles import ROLE_COLUMNS

_BASIC = "data.dataset_param.basic_parameters"
_PLACES_SHOWN = 3
_PROBLEMS_SHOWN = 10


_PARTS = frozenset(
    {"start", "end", "start_s", "end_s", "start_time", "end_time", "start_frame", "end_frame", "clip", "crop"}
    | {"timestamp", "timestamps", "segment"}
)
"""What other tools call the part of a medium that they take."""


def unread_columns(extras: Mapping[str, object], *, chooses_captions: bool = False) -> list[str]:
    """Columns that a task does not read although they look as if they mattered: further captions, unless the
    configuration chooses their column, parts of a medium, and media of other tasks, by their names and values."""
    known = _PARTS if chooses_captions else {*_PARTS, *CAPTION_COLUMNS}
    found = sorted(extras.keys() & known)
    for name in sorted(ROLE_COLUMNS & extras.keys()):
        if Path(str(extras[name])).suffix.lower() in MEDIA_SUFFIXES:
            found.append(name)
    return found


def unread_columns_notes(unread: Mapping[str, int], rows: int) -> Iterator[str]:
    """What to say of them, a note for each kind."""
    for kind, reason in (
        (ROLE_COLUMNS, "as other tasks call their media; this task does not read {it}"),
        (CAPTION_COLUMNS, f"beside the one that captions are taken from; {_BASIC}.caption_column chooses"),
        (_PARTS, "which this task does not read: whole media count. `cut`, [first frame, end], takes a part of a clip"),
    ):
        if names := sorted(unread.keys() & {*kind}):
            most, whose = max(unread[name] for name in names), by_count(len(names), "a column", "columns")
            told = f"{most} of {rows} rows {by_count(most, 'has', 'have')} {whose} {', '.join(names)}, {reason}"
            yield told.format(it=by_count(len(names), "it", "them"))


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
