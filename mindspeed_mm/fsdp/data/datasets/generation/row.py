"""One row of a medium with captions: what its columns say.

A row names one picture or clip and one or more captions. What it says of the medium's size saves a look into the file;
columns that nobody asks for are kept as `extras`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.fsdp.data.data_utils.decoding.video import FrameSpan
from mindspeed_mm.fsdp.data.data_utils.media import decode_data_url, is_data_url, refuse_remote
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation
from mindspeed_mm.fsdp.data.datasets.generation.captions import captions_of
from mindspeed_mm.fsdp.data.datasets.generation.pair_rows import as_pair, take_scores
from mindspeed_mm.fsdp.data.datasets.generation.row_files import CompanionFolder
from mindspeed_mm.fsdp.models.diffusion.media_roles import REJECTED, MediaRole, spread_lists, unfit

MEDIA_COLUMNS = ("path", "file", "video", "video_path", "image", "image_path", "file_name", "media")
"""Where a row may name its medium, in this order."""
CAPTION_COLUMNS = ("cap", "captions", "caption", "prompt", "text")
"""Where a row may have its captions, in this order."""

_BASIC = "data.dataset_param.basic_parameters"


@dataclass(frozen=True, slots=True)
class GenerationRow:
    """One picture or clip with its captions."""

    place: RowLocation
    media: str | bytes
    """Path, absolute or from the media root; or the file itself."""
    captions: tuple[str, ...]
    """One of them is drawn per epoch."""
    num_frames: int | None = None
    """As the row declares it, like the next three."""
    fps: float | None = None
    height: int | None = None
    width: int | None = None
    cut: FrameSpan | None = None
    """The frames of the file that are the clip; None: all."""
    extras: JsonMapping = field(default_factory=dict)
    """Columns that are none of the above."""
    roles: Mapping[str, str | bytes] = field(default_factory=dict)
    """Further media by their role, see `MediaRole`."""
    scores: tuple[float, ...] = ()
    """Of the chosen and the rejected side of a preference pair."""
    repeats: int = 1
    """How often an epoch reads it."""
    is_prior: bool = False
    """Whether it preserves the prior."""
    told: str = ""
    """What to call a medium whose path begins with the folder of a data set, which may be moved; empty: its path."""
    told_roles: Mapping[str, str] = field(default_factory=dict)
    """The same of its further media."""

    @property
    def name(self) -> str:
        """What to call the medium in messages and in the index of features."""
        if self.told:
            return self.told
        if isinstance(self.media, str):
            return self.media
        return f"bytes of {self.place}"

    @property
    def name_of_part(self) -> str:
        """The same, with the frames that are cut out of it."""
        return f"{self.name} {self.cut}" if self.cut else self.name

    def media_of_roles(self) -> dict[str, GenerationRow]:
        """Role → the row as if its medium were the one of the role."""
        return {role: GenerationRow(self.place, medium, self.captions) for role, medium in self.roles.items()}

    @property
    def declares(self) -> bool:
        """Whether the row says anything of its medium's size."""
        return (self.height, self.width, self.num_frames, self.fps) != (None, None, None, None)

    @property
    def digest(self) -> str:
        """What the row says, its place aside, in 16 hex digits; of a medium that stands in the row, its bytes too."""
        declared = (self.num_frames, self.fps, self.height, self.width)
        medium = self.told or self.media
        said: list[object] = [medium, self.captions, declared, sorted(self.extras.items())]
        if self.roles:
            roles = [(name, self.told_roles.get(name) or medium) for name, medium in self.roles.items()]
            said.append(sorted(roles))
        if self.repeats > 1:
            said.append(self.repeats)
        if self.is_prior:
            said.append("prior")
        if self.scores:
            said.append(self.scores)
        if self.cut:
            said.append(str(self.cut))
        # As a tuple: so digests were written before.
        return blake2b(repr(tuple(said)).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


@dataclass(frozen=True)
class ColumnNames:
    """Columns that the configuration names; None: the usual ones are tried."""

    media: str | None = None
    caption: str | None = None


def parse_row(
    row: Mapping[str, object],
    place: RowLocation,
    columns: ColumnNames,
    folder: str = "",
    roles: Sequence[MediaRole] = (),
    companions: Sequence[CompanionFolder] = (),
    caption: str | None = None,
) -> GenerationRow:
    """Read what a row says.

    Args:
        row: Column → value; empty values count as absent.
        place: Where it stands.
        columns: What holds the medium and the captions.
        folder: Put before relative paths.
        roles: Further media that it names.
        companions: Where those are that it does not name.
        caption: Of a row that has none.

    Raises:
        DataError: Naming place, column and value.
    """
    if REJECTED not in roles:
        _check_not_null(row, columns, place, needs_caption=caption is None)
    rest = {name: value for name, value in row.items() if value is not None}
    scores: tuple[float, ...] = ()
    if REJECTED in roles:
        rest = as_pair(rest, place)
        scores = take_scores(rest, place)
    media = _medium(_taken_field(rest, columns.media, MEDIA_COLUMNS, place, "medium"), folder, place)
    for companion in companions:
        if companion.column not in rest:
            rest[companion.column] = companion.of(media, place)
    rest = _one_column_each(rest, roles, place)
    of_roles: dict[str, str | bytes] = {}
    for role in roles:
        found = _of_role(role, rest, folder, place)
        if found is not None:
            of_roles[role.name] = found
    _check_together(roles, of_roles, rest, place)
    if caption is not None and not any(name in rest for name in _tried(columns.caption, CAPTION_COLUMNS)):
        captions: tuple[str, ...] = (caption,)
    else:
        captions = captions_of(_taken_field(rest, columns.caption, CAPTION_COLUMNS, place, "caption"), place)
    resolution = rest.pop("resolution", None) or {}
    if not isinstance(resolution, Mapping):
        raise DataError(
            f"{resolution!r} is not a resolution",
            where=str(place),
            key="resolution",
            way_out='Give {"height", "width"}.',
        )
    height = resolution.get("height", rest.pop("height", None))
    width = resolution.get("width", rest.pop("width", None))
    num_frames = _whole_number(rest.pop("num_frames", None), "num_frames", place)
    cut = _cut(rest.pop("cut", None), num_frames, place)
    if cut is not None:
        _check_one_medium(roles, of_roles, place)
        if cut.end is not None:
            num_frames = cut.end - cut.first
    return GenerationRow(
        place,
        media,
        captions,
        num_frames=num_frames,
        fps=_number(rest.pop("fps", None), "fps", place),
        height=_whole_number(height, "height", place),
        width=_whole_number(width, "width", place),
        cut=cut,
        extras=rest,
        roles=of_roles,
        scores=scores,
    )


def _of_role(role: MediaRole, row: JsonObject, folder: str, place: RowLocation) -> str | bytes | None:
    """The medium of a role, whose column is taken out of the row; None where there need be none."""
    for name in role.columns:
        if name in row:
            return _medium((name, row.pop(name)), folder, place)
    if role.is_optional or role.frame_of_target is not None:
        return None
    raise DataError(
        f"the row has no {role.name.replace('_', ' ')}: none of {', '.join(role.columns)} among {', '.join(row)}",
        where=str(place),
        key=role.columns[0],
        way_out="Name the file in a column of that name, or set model.task to what the rows are for.",
    )


def _check_together(
    roles: Sequence[MediaRole], given: Collection[str], others: Iterable[str], place: RowLocation
) -> None:
    """Raise `DataError` where media that stand in for each other all lack, or one is there without what it is of."""
    if (found := unfit(roles, given)) is None:
        return
    role, needed = found
    way_out = "Name the file in a column of that name, or set model.task to what the rows are for."
    if role.name in given:
        what = f"the row has a {role.name} and no {needed} that it would be of"
        raise DataError(what, where=str(place), key=role.columns[0], way_out=f"Name the {needed}, or leave it out.")
    what = f"the row has neither a {role.name} nor a {needed}: none of {', '.join(role.columns)} among "
    raise DataError(what + ", ".join([*others, *given]), where=str(place), key=role.columns[0], way_out=way_out)


def _cut(value: object, num_frames: int | None, place: RowLocation) -> FrameSpan | None:
    """`[first frame, the one behind the last]`, or the first alone, from where `num_frames` count; so MindSpeed-MM and
    Open-Sora-Plan write it."""
    if value is None:
        return None
    way_out = "Give [first frame, the one behind the last], from 0, or leave it out."
    refused = DataError(f"{str(value)[:60]} are no frames of a video", where=str(place), key="cut", way_out=way_out)
    numbers: list[int] = []
    for each in value if isinstance(value, list | tuple) else [value]:
        numbers.append(each if isinstance(each, int) and not isinstance(each, bool) else -1)
    if not 1 <= len(numbers) <= 2 or min(numbers) < 0:
        raise refused
    first, end = numbers[0], None if len(numbers) == 1 else numbers[1]
    if end is None and num_frames is not None:
        end = first + num_frames
    if end is not None and end <= first:
        raise refused
    if end is not None and num_frames not in (None, end - first):
        way_out = "Correct one of them, or leave num_frames out."
        what = f"{value} are {end - first} frames, and num_frames says {num_frames}"
        raise DataError(what, where=str(place), key="cut", way_out=way_out)
    return FrameSpan(first, end)


def _check_one_medium(roles: Sequence[MediaRole], given: Collection[str], place: RowLocation) -> None:
    """Raise `DataError` where a clip is cut out of its file and another clip or sound belongs to it: of which part of
    the other, nobody says."""
    for role in roles:
        if role.name in given and role.frames != "one":
            raise DataError(
                f"the row has a {role.name} of its own, of which cut does not say a part",
                where=str(place),
                key="cut",
                way_out="Cut both files beforehand: ffmpeg -ss START -to END -i old new.",
            )


def _one_column_each(row: JsonObject, roles: Sequence[MediaRole], place: RowLocation) -> JsonObject:
    """Several pictures in one column, in columns of their own."""
    named: dict[str, tuple[str, ...]] = {}
    """Column of the first → those of all."""
    for role in roles:
        for column in role.columns:
            if role.is_optional and column[-1].isdigit():
                first = column.rpartition("_")[0]
                named[first] = (*named.get(first, (first,)), column)
    try:
        return spread_lists(row, named)
    except ValueError as error:
        raise DataError(
            f"{len(row[str(error)])} pictures, and the model takes {len(named[str(error)])} at most",
            where=str(place),
            key=str(error),
            way_out="Leave some out.",
        ) from None


def _check_not_null(
    row: Mapping[str, object], columns: ColumnNames, place: RowLocation, *, needs_caption: bool = True
) -> None:
    """A column that is there and holds nothing is another fault than one that is not there."""
    for named, usual, way_out in (
        (columns.media, MEDIA_COLUMNS, "Give the path of a file, or take the row out."),
        (columns.caption, CAPTION_COLUMNS, 'Give text; "" for a sample that is trained without a caption.'),
    ):
        there = [name for name in _tried(named, usual) if name in row]
        if usual is CAPTION_COLUMNS and not needs_caption:
            continue
        if there and all(row[name] is None for name in there):
            raise DataError("is null", where=str(place), key=there[0], way_out=way_out)


def _taken_field(
    row: JsonObject, named: str | None, usual: Sequence[str], place: RowLocation, what: str
) -> tuple[str, object]:
    tried = _tried(named, usual)
    for name in tried:
        if name in row:
            return name, row.pop(name)
    looked_for = ", ".join(tried)
    if named is not None:
        looked_for = f"'{named}'"
    key = {"medium": "media_column", "caption": "caption_column"}[what]
    raise DataError(
        f"the row has no {what}: none of {looked_for} among {', '.join(row) or 'no columns'}",
        where=str(place),
        way_out=f"Name the column in {_BASIC}.{key}.",
    )


def _tried(named: str | None, usual: Sequence[str]) -> Sequence[str]:
    """Columns that are looked for, in this order."""
    if named is None:
        return usual
    return (named,)


def _medium(found: tuple[str, object], folder: str, place: RowLocation) -> str | bytes:
    name, value = found
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path") or value.get("url")
    if isinstance(value, bytes) and value:
        return value
    if not isinstance(value, str) or not value.strip() or "\x00" in value:
        shown = str(value)[:60]
        raise DataError(f"{shown!r} is not a path", where=str(place), key=name, way_out="Give the path of one file.")
    if is_data_url(value):
        try:
            return decode_data_url(value)[0]
        except DataError as error:
            (problem,) = error.problems
            raise DataError(problem.what, where=str(place), key=name, way_out=problem.way_out) from error
    refuse_remote(value, str(place))
    return os.path.join(folder, value)  # noqa: PTH118 (of every row)


def _whole_number(value: object, name: str, place: RowLocation) -> int | None:
    number = _number(value, name, place, "whole number")
    if number is None:
        return None
    return int(number)


def _number(
    value: Any, name: str, place: RowLocation, kind: Literal["number", "whole number"] = "number"
) -> float | None:
    """A number above 0, also as text (tables have nothing else); None stays."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    is_right = math.isfinite(number) and number > 0 and not isinstance(value, bool)
    if not is_right or (kind == "whole number" and number != math.trunc(number)):
        raise DataError(
            f"{str(value)[:60]} is not a {kind} above 0",
            where=str(place),
            key=name,
            way_out="Correct it, or leave it out: the file's own header is read then.",
        )
    return number
