"""Rows of media with captions, whatever the format: one `GenerationRow` each.

A row names one picture or clip and one or more captions. What it says of the medium's size saves a look into the file;
columns that nobody asks for are kept as `extras`.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Literal, overload

import numpy as np

from mindspeed_mm.core.counts import by_count
from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.fsdp.data.data_utils.media import (
    MediaLoader,
    check_remote_media_off,
    decode_data_url,
    is_data_url,
    refuse_remote,
)
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation
from mindspeed_mm.fsdp.data.datasets.generation.captions import CaptionRules, captions_of
from mindspeed_mm.fsdp.data.datasets.generation.pair_rows import as_pair, take_scores
from mindspeed_mm.fsdp.data.datasets.generation.row_files import CompanionFolder, RowFile, open_row_files
from mindspeed_mm.fsdp.data.datasets.generation.row_notes import (
    all_unusable,
    empty_captions_note,
    media_columns,
    none_fits,
    unread_columns_note,
)
from mindspeed_mm.fsdp.models.diffusion.media_roles import REJECTED, MediaRole, spread_lists, unfit
from mindspeed_mm.fsdp.params.data_args import BasicParameters

MEDIA_COLUMNS = ("path", "file", "video", "video_path", "image", "image_path", "file_name", "media")
"""Where a row may name its medium, in this order."""
CAPTION_COLUMNS = ("cap", "captions", "caption", "prompt", "text")
"""Where a row may have its captions, in this order."""

_BASIC = "data.dataset_param.basic_parameters"
_ROWS_TRIED = 100
_CHUNK_BYTES = 2**20


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
        # As a tuple: so digests were written before.
        return blake2b(repr(tuple(said)).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


@dataclass(frozen=True)
class ColumnNames:
    """Columns that the configuration names; None: the usual ones are tried."""

    media: str | None = None
    caption: str | None = None


class GenerationRows(Sequence[GenerationRow]):
    """The good rows of some files; each is parsed when it is asked for.

    Args:
        files: Where the rows stand.
        columns: What holds the medium and the captions.
        most: Most rows taken from each file; each may have a limit of its own.
        may_skip: Leave out rows that are off (`left_out`) instead of raising.
        look: Called with each good row while all are looked through; what it returns is kept in `looks`.
        rules: What becomes of captions.
        roles: Further media that rows have.

    Raises:
        DataError: A row is off; or none of the first rows has the columns.
    """

    def __init__(
        self,
        files: Sequence[RowFile],
        columns: ColumnNames,
        most: int | None = None,
        *,
        may_skip: bool = False,
        look: Callable[[GenerationRow], object] | None = None,
        rules: CaptionRules | None = None,
        roles: Sequence[MediaRole] = (),
    ) -> None:
        self.files = tuple(files)
        self._columns, self._rules, self._roles = columns, rules or CaptionRules(), tuple(roles)
        self._ends = [0]
        """Number of the first row of each file, and of all rows."""
        for file in self.files:
            count = len(file.reader)
            for limit in (most, file.most):
                if limit is not None:
                    count = min(count, limit)
            self._ends.append(self._ends[-1] + count)
        self.left_out: dict[str, str] = {}
        """Place → reason, of rows that cannot be used."""
        self.duplicates = 0
        """Rows that say the very same as another."""
        self.empty_captions: list[str] = []
        """Places of rows with an empty caption."""
        self.looks: list[Any] = []
        """What `look` made of each good row."""
        self._unread: Counter[str] = Counter()
        """Columns of media that another task would read → rows that have them."""
        self._kept = self._look_through(may_skip, look or (lambda row: None))
        if self._unread:
            warnings.warn(unread_columns_note(self._unread, len(self)), stacklevel=2)
        if note := empty_captions_note(self.empty_captions, len(self)):
            warnings.warn(note, stacklevel=2)
        if self.duplicates:
            verb = by_count(self.duplicates, "repeats", "repeat")
            warnings.warn(
                f"{self.duplicates} of {len(self)} rows {verb} another: the same media, captions and columns. In an "
                "epoch they share their noise",
                stacklevel=2,
            )

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> GenerationRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[GenerationRow]: ...
    def __getitem__(self, index: int | slice) -> GenerationRow | list[GenerationRow]:
        """Parse good row `index`, or each of a slice. Left-out rows are not counted."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._parse(int(self._kept[index]))

    def __iter__(self) -> Iterator[GenerationRow]:
        return map(self._parse, map(int, self._kept))

    def place(self, index: int) -> RowLocation:
        """Where row `index` stands, without reading it."""
        file, number = self._locate(int(self._kept[index]))
        return file.reader.place(number)

    def file_number(self, index: int) -> int:
        """Which of `files` row `index` stands in."""
        return bisect.bisect_right(self._ends, int(self._kept[index])) - 1

    def entries(self) -> list[str]:
        """Of each row, the entry of `dataset` that it belongs to."""
        return [self.files[self.file_number(index)].entry for index in range(len(self))]

    def leave_out(self, reasons: Mapping[int, str]) -> None:
        """Take rows out, by index: their media cannot be used."""
        for index, reason in reasons.items():
            self.left_out[str(self.place(index))] = reason
        self._kept = np.delete(self._kept, list(reasons))

    def _locate(self, number: int) -> tuple[RowFile, int]:
        which = bisect.bisect_right(self._ends, number) - 1
        return self.files[which], number - self._ends[which]

    def _parse(self, number: int) -> GenerationRow:
        file, at = self._locate(number)
        given = (file.reader.read(at), file.reader.place(at), self._columns, file.folder)
        row = parse_row(*given, self._roles, file.companions, file.caption)
        rules = self._rules
        if file.is_prior:  # pictures of the class: the trigger word is the subject's
            rules = replace(rules, trigger_word=None)
        return replace(
            row,
            captions=rules(row.captions),
            repeats=file.repeats,
            is_prior=file.is_prior,
            told=file.told(row.media),
            told_roles={name: file.told(each) for name, each in row.roles.items()},
        )

    def _look_through(self, may_skip: bool, look: Callable[[GenerationRow], object]) -> np.ndarray:
        total, kept = self._ends[-1], list[int]()
        seen: set[int] = set()
        faults: list[DataError] = []
        for number in range(total):
            try:
                row = self._parse(number)
            except DataError as error:
                faults.append(error)
                file, at = self._locate(number)
                self.left_out[str(file.reader.place(at))] = str(error)
                if len(faults) == number + 1 == min(total, _ROWS_TRIED):
                    raise none_fits(number + 1, faults[0], file.reader) from None
                continue
            kept.append(number)
            self.looks.append(look(row))
            self._unread.update(media_columns(row.extras))
            if not all(map(str.strip, row.captions)):
                self.empty_captions.append(str(row.place))
            # Hashes instead of the rows themselves: 8 bytes each; a rare clash only counts one row too many.
            media = (row.media, *sorted(row.roles.items()))
            told = hash((media, row.captions, repr(row.extras), repr(self._locate(number)[0].sizes)))
            self.duplicates += told in seen
            seen.add(told)
        if faults and not may_skip:
            raise all_unusable(faults, total)
        return np.array(kept, dtype=np.int64)


def read_rows(
    basic: BasicParameters,
    look: Callable[[GenerationRow], object] | None = None,
    files: Sequence[RowFile] | None = None,
    roles: Sequence[MediaRole] = (),
) -> GenerationRows:
    """The rows that the configuration names.

    Args:
        basic: `dataset`, `dataset_dir`, `data_folder`, `data_storage_mode`, `media_column`, `caption_column`,
            `max_samples`, `on_bad_sample`.
        look: See `GenerationRows`.
        files: From `open_row_files`, where they are opened.
        roles: See `GenerationRows`.

    Raises:
        DataError: Files are missing or broken, none of the first rows has a medium and a caption, or a row is off and
            `on_bad_sample` is `error`.
        ConfigError: No rows are named, or remote media are asked for.
    """
    check_remote_media_off(basic.allow_remote_media)
    if files is None:
        files = open_row_files(basic)
    columns = ColumnNames(basic.get("media_column"), basic.get("caption_column"))
    may_skip, rules = basic.on_bad_sample == "skip", CaptionRules.read(basic)
    _check_companions(files, roles)
    return GenerationRows(files, columns, basic.max_samples, may_skip=may_skip, look=look, rules=rules, roles=roles)


def _check_companions(files: Sequence[RowFile], roles: Sequence[MediaRole]) -> None:
    """Folders of media that the task has no use for would be passed over in silence."""
    known: list[str] = []
    for role in roles:
        known += role.columns
    for file in files:
        for companion in file.companions:
            if companion.column not in known:
                raise ConfigError(
                    "is no medium that the model is given",
                    key=companion.key,
                    way_out=f"Set model.task to what the data are for. This task takes {', '.join(known) or 'none'}.",
                )


def build_media_loader(basic: BasicParameters, files: Sequence[RowFile] = ()) -> MediaLoader:
    """The door to the media of the rows: relative paths start at `data_folder`, else at `dataset_dir`.

    Args:
        basic: Names them, and `media_roots`.
        files: Of the rows; where these say themselves where their media are, nothing else is needed.

    Raises:
        DataError: That folder is not there.
    """
    root, key = Path(basic.dataset_dir or ""), "dataset_dir"
    folder = basic.get("data_folder")
    if folder is not None:
        key = "data_folder"
        if Path(folder).is_dir():
            root = Path(folder)
        else:
            root = root / folder
    own: list[str] = []
    companions: list[str] = []
    for file in files:
        if file.media_root is not None:
            own.append(file.media_root)
        for companion in file.companions:
            companions.append(str(companion.path))
    is_named = basic.dataset_dir is not None or folder is not None
    if files and len(own) == len(files) and not (is_named and root.is_dir()):
        root, is_named, key = Path(own[0]), True, "dataset"
    if not is_named:
        raise DataError(
            "is not given, and some rows do not say where their media are",
            key=f"{_BASIC}.{key}",
            way_out="Name the folder that the rows' paths start at.",
        )
    if not root.is_dir():  # said once, not for every row
        raise DataError(
            f"'{root}' is not a folder",
            key=f"{_BASIC}.{key}",
            way_out="Name the folder that the rows' paths start at.",
        )
    named: list[str] = []
    if basic.dataset_dir is not None:
        named.append(basic.dataset_dir)
    return MediaLoader(root, (*named, *basic.media_roots, *dict.fromkeys(own), *dict.fromkeys(companions)))


def media_digest(media: bytes | BinaryIO) -> bytes:
    """16 bytes that stand for a medium, wherever it lies.

    Args:
        media: The file's bytes, or the file opened for reading; it is read to its end.
    """
    digest = blake2b(digest_size=16)
    if isinstance(media, bytes):
        digest.update(media)
        return digest.digest()
    while chunk := media.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.digest()


def content_key(digest: bytes, captions: Sequence[str], extras: Mapping[str, object]) -> str:
    """What a sample is, in 32 hex digits: the same wherever the file lies and whatever it is called.

    Args:
        digest: `media_digest` of its medium.
        captions: All captions of the row.
        extras: Its further columns.
    """
    words = json.dumps([list(captions), dict(extras)], sort_keys=True, default=str)
    return blake2b(digest + words.encode(), digest_size=16).hexdigest()


# --- one row ---------------------------------------------------------------------------------------------------------


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
    return GenerationRow(
        place,
        media,
        captions,
        num_frames=_whole_number(rest.pop("num_frames", None), "num_frames", place),
        fps=_number(rest.pop("fps", None), "fps", place),
        height=_whole_number(height, "height", place),
        width=_whole_number(width, "width", place),
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
