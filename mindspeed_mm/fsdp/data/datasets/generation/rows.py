"""Rows of media with captions, whatever the format: one `GenerationRow` each."""

from __future__ import annotations

import bisect
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np

from mindspeed_mm.core.counts import by_count
from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data.data_utils.media import (
    MediaLoader,
    check_remote_media_off,
)
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation
from mindspeed_mm.fsdp.data.datasets.generation.captions import CaptionRules
from mindspeed_mm.fsdp.data.datasets.generation.row import ColumnNames, GenerationRow, parse_row
from mindspeed_mm.fsdp.data.datasets.generation.row_files import RowFile, open_row_files
from mindspeed_mm.fsdp.data.datasets.generation.row_notes import (
    all_unusable,
    empty_captions_note,
    none_fits,
    unread_columns,
    unread_columns_notes,
)
from mindspeed_mm.fsdp.models.diffusion.media_roles import MediaRole
from mindspeed_mm.fsdp.params.data_args import BasicParameters

_BASIC = "data.dataset_param.basic_parameters"
_ROWS_TRIED = 100
_CHUNK_BYTES = 2**20


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
        """Columns that are not read and look as if they mattered → rows that have them."""
        self._kept = self._look_through(may_skip, look or (lambda row: None))
        for note in unread_columns_notes(self._unread, len(self)):
            warnings.warn(note, stacklevel=2)
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
            self._unread.update(unread_columns(row.extras, chooses_captions=self._columns.caption is not None))
            if not all(map(str.strip, row.captions)):
                self.empty_captions.append(str(row.place))
            # Hashes instead of the rows themselves: 8 bytes each; a rare clash only counts one row too many.
            media = (row.media, *sorted(row.roles.items()))
            told = hash((media, row.cut, row.captions, repr(row.extras), repr(self._locate(number)[0].sizes)))
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
