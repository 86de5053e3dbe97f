"""Captioned media without a table of rows: a folder with a text file beside each picture or clip, and tar archives.

The folder is that of kohya's scripts and their relatives: `a.png` beside `a.txt`; a folder `10_dog` is read ten times
an epoch, and its media without a text file have the caption `dog`. The archives are WebDataset's: members of one name
are one sample.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.fsdp.data.data_utils.rows.readers import SUFFIXES
from mindspeed_mm.fsdp.data.data_utils.rows.sources import INFO_FILE
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation
from mindspeed_mm.fsdp.data.data_utils.tar_members import SUFFIX as TAR_SUFFIX
from mindspeed_mm.fsdp.data.data_utils.tar_members import MemberSpan, members_of, open_span

MEDIA_SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi"}
)
CAPTION_SUFFIXES = (".txt", ".caption")
"""Of the file beside a medium; the first that is there counts."""
METADATA = tuple(f"metadata{suffix}" for suffix in (".jsonl", ".csv", ".parquet"))
"""Tables of an image folder (`datasets`); their paths start where they lie."""

_KEY = "data.dataset_param.basic_parameters.dataset"
_REPEATED = re.compile(r"(\d+)_(.+)")
_MOST_CAPTION_BYTES = 2**20


class FilePlace(RowLocation):
    """A sample that is a file of its own, printed as its path."""

    __slots__ = ()

    def __str__(self) -> str:
        return self.file


class CaptionedFolder:
    """The media that lie in one folder, in the order of their names, each with the text file beside it.

    Args:
        path: The folder; folders inside are others.
        name: What to call it.
        media: Names of its files that are media.
        others: Names of files among which those of their captions are.
        default: Caption of media without a text file; None: such a medium is a bad row.
    """

    def __init__(
        self, path: Path, name: str, media: Sequence[str], others: Sequence[str], default: str | None = None
    ) -> None:
        self.path, self.name, self._default = path, name, default
        self._media = sorted(media)
        texts = set(others)
        self._captions = [_beside(medium, texts) for medium in self._media]

    def __len__(self) -> int:
        return len(self._media)

    def place(self, index: int) -> RowLocation:
        """Path of the medium."""
        return FilePlace(f"{self.name}/{self._media[index]}", index + 1)

    def read(self, index: int) -> dict[str, Any]:
        """Medium `index` as `path` and `captions`; each line of the text is a caption of its own.

        Raises:
            DataError: It has no text file, or one that cannot be read.
        """
        medium, caption = self._media[index], self._captions[index]
        if caption is not None:
            return {"path": medium, "captions": _lines(_read_text(self.path / caption))}
        if self._default is None:
            stem = PurePath(medium).stem
            raise DataError(
                f"the medium has no caption: there is no {stem}.txt beside it",
                where=str(self.place(index)),
                way_out="Write one; an empty file trains it without a caption.",
            )
        return {"path": medium, "captions": [self._default]}

    def facts(self) -> dict[str, Any]:
        """Name, rows, and the files with size and time of change."""
        marks = []
        for medium, caption in zip(self._media, self._captions, strict=True):
            for name in (medium, caption):
                if name is not None:
                    status = (self.path / name).stat()
                    marks.append((name, status.st_size, status.st_mtime_ns))
        return {"name": self.name, "rows": len(self), "files": marks}


class TarSamples:
    """The samples of a WebDataset archive: members that share their name up to its first dot.

    `a.jpg` is the medium, `a.txt` its caption, `a.json` further columns; `a.source.jpg` is a column `source`.

    Args:
        path: The archive.
        name: What to call it; None: by its name.

    Raises:
        DataError: It is no archive, or holds no media.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path, self.name = path, name or path.name
        self._samples = list(_samples_of(members_of(path)))
        """Name → member by its ending, of each sample with a medium."""
        if not self._samples:
            raise DataError(
                "the archive holds no pictures or clips",
                where=str(path),
                key=_KEY,
                way_out="Samples of a WebDataset are members of one name: 0001.jpg, 0001.txt.",
            )

    def __len__(self) -> int:
        return len(self._samples)

    def place(self, index: int) -> RowLocation:
        """Name of the sample in its archive."""
        return FilePlace(f"{self.name}/{self._samples[index][0]}", index + 1)

    def read(self, index: int) -> dict[str, Any]:
        """Sample `index`; media as paths through the archive.

        Raises:
            DataError: A text or a JSON member cannot be read.
        """
        _, parts = self._samples[index]
        row: dict[str, Any] = {}
        if "json" in parts:
            columns = self._columns(parts["json"], index)
            row |= {name: value for name, value in columns.items() if value is not None}
        for ending, member in parts.items():
            column, _, kind = ending.rpartition(".")
            if _is_medium(f".{kind}"):
                row[column or "path"] = f"{self.path.absolute()}/{member}"
        for suffix in CAPTION_SUFFIXES:
            caption = parts.get(suffix.removeprefix("."))
            if caption is not None:
                row["cap"] = _lines(_decoded(self._bytes(caption), f"{self.name}/{caption}"))
                break
        return row

    def _columns(self, member: str, index: int) -> dict[str, Any]:
        try:
            found = parse_json(self._bytes(member))
        except ValueError as error:
            raise DataError(f"'{member}' cannot be read as JSON: {error}", where=str(self.place(index))) from error
        if not isinstance(found, dict):
            raise DataError(f"'{member}' is not an object", where=str(self.place(index)))
        return found

    def _bytes(self, member: str) -> bytes:
        span: MemberSpan = members_of(self.path)[member]
        if span.size > _MOST_CAPTION_BYTES:
            raise DataError(f"'{member}' has {span.size} bytes: it is no text of a sample", where=self.name)
        with open_span(self.path.open("rb"), span) as file:
            return file.read()


def _samples_of(members: Iterable[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Members of an archive that share their name up to its first dot, where one of them is a medium."""
    samples: dict[str, dict[str, str]] = {}
    for member in members:
        folder, _, file = member.rpartition("/")
        stem, _, ending = file.partition(".")
        samples.setdefault(f"{folder}/{stem}".removeprefix("/"), {})[ending.lower()] = member
    for name, parts in samples.items():
        if any(_is_medium(f".{ending}") for ending in parts):
            yield name, parts


def holds_media(path: Path) -> bool:
    """Whether a folder is read by itself and not as a folder of tables: it has a `metadata` table, archives, or media
    with text files beside them.

    Raises:
        DataError: It could be either.
    """
    tables: list[Path] = []
    captioned = False
    for folder, files in _walk(path):
        if any(name in METADATA or name.endswith(TAR_SUFFIX) for name in files):
            return True
        media = {PurePath(name).stem for name in files if _is_medium(name)}
        captioned |= bool(media) and _REPEATED.fullmatch(folder.name) is not None
        for name in files:
            is_of_medium = PurePath(name).stem in media
            captioned |= is_of_medium and name.endswith(CAPTION_SUFFIXES)
            if _is_table(name) and not is_of_medium:
                tables.append(folder / name)
    if captioned and tables:
        raise DataError(
            f"the folder holds media with text files, and the table {tables[0].relative_to(path)}",
            where=str(path),
            key=_KEY,
            way_out="Name the table, or take it out of the folder.",
        )
    return captioned or not tables


def open_media_folder(
    path: Path, apart: frozenset[Path] = frozenset()
) -> Iterator[tuple[CaptionedFolder | TarSamples | Path, Path, int]]:
    """What a folder holds: a `metadata` table, an archive, or a folder of captioned media; the folder that its paths
    start at; and how often an epoch reads it.

    Args:
        path: The folder.
        apart: Absolute paths of folders inside that are left out.

    Raises:
        DataError: It holds no media.
    """
    has_any = False
    for here, files in _walk(path, apart):
        tables = [name for name in METADATA if name in files]
        archives = [name for name in files if name.endswith(TAR_SUFFIX)]
        media = [name for name in files if _is_medium(name)]
        has_any |= bool(tables or archives or media)
        if tables:
            yield here / tables[0], here, 1
        elif archives:
            for name in archives:
                yield TarSamples(here / name), here, 1
        elif media and not _is_below_table(here, path):
            default: str | None = None
            repeats = 1
            if named := _REPEATED.fullmatch(here.name):
                default, repeats = named[2].replace("_", " "), max(1, int(named[1]))
            name = here.relative_to(path.parent).as_posix()
            yield CaptionedFolder(here, name, media, files, default), here, repeats
    if not has_any:
        raise DataError(
            "the folder holds neither media nor tables of them",
            where=str(path),
            key=_KEY,
            way_out="Put pictures or clips there with a .txt of the same name beside each, or a metadata.jsonl.",
        )


def _is_below_table(folder: Path, root: Path) -> bool:
    """Whether the media are those of a `metadata` table further up."""
    for above in (folder, *folder.parents):
        if any((above / name).is_file() for name in METADATA):
            return True
        if above == root:
            break
    return False


def _walk(path: Path, apart: frozenset[Path] = frozenset()) -> Iterator[tuple[Path, list[str]]]:
    """Folders with their files in the order of their names, without what is hidden or apart."""
    for folder, folders, files in os.walk(path):
        here = Path(folder)
        folders[:] = [name for name in sorted(folders) if _is_shown(name) and (here / name).absolute() not in apart]
        yield here, [name for name in sorted(files) if _is_shown(name)]


def _is_shown(name: str) -> bool:
    return not name.startswith(".")


def _is_table(name: str) -> bool:
    return name.endswith(SUFFIXES) and name != INFO_FILE


def _is_medium(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in MEDIA_SUFFIXES or name.lower() in MEDIA_SUFFIXES  # noqa: PTH122


def _beside(medium: str, texts: set[str]) -> str | None:
    """The text file of a medium, if it is among some files."""
    stem = os.path.splitext(medium)[0]  # noqa: PTH122
    for suffix in CAPTION_SUFFIXES:
        if stem + suffix in texts:
            return stem + suffix
    return None


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_CAPTION_BYTES:
            raise DataError("is too long for a caption", where=str(path))
        return _decoded(path.read_bytes(), str(path))
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"byte {error.start} is not UTF-8", where=where, way_out="Save the file as UTF-8.") from error


def _lines(text: str) -> list[str]:
    """The lines that say something; one empty caption where none does."""
    return [line.strip() for line in text.splitlines() if line.strip()] or [""]
