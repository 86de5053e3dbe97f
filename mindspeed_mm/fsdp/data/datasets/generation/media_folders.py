"""Captioned media without a table of rows: a folder with a text file beside each picture or clip, and tar archives.

The folder is that of kohya's scripts and their relatives (`generate_dreambooth_subsets_config_by_subdirs` of
sd-scripts): `a.png` beside `a.txt`; a folder `10_dog` is read ten times an epoch, and its media without a text file
have the caption `dog`. The archives are WebDataset's: members of one name are one sample.

What looks like a medium and is of no format that is read is a bad sample, so that it does not vanish in silence.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.core.counts import by_count
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.folder_kinds import is_output
from mindspeed_mm.core.json_file import JsonObject, parse_json
from mindspeed_mm.fsdp.data.data_utils.decoding.image_media import IMAGE_SUFFIXES
from mindspeed_mm.fsdp.data.data_utils.decoding.video import VIDEO_SUFFIXES
from mindspeed_mm.fsdp.data.data_utils.rows.readers import SUFFIXES
from mindspeed_mm.fsdp.data.data_utils.rows.sources import INFO_FILE
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation
from mindspeed_mm.fsdp.data.data_utils.tar_members import SUFFIX as TAR_SUFFIX
from mindspeed_mm.fsdp.data.data_utils.tar_members import MemberSpan, members_of, open_span

MEDIA_SUFFIXES = IMAGE_SUFFIXES | VIDEO_SUFFIXES
_NOT_READ = (
    ".heic .heif .hif .jxl .psd .svg .eps .ico .tga .exr .hdr .dds .qoi .xcf .pfm .dib .dng .cr2 .cr3 .nef .arw .orf "
    ".rw2 .raf .wmv .flv .f4v .mpg .mpeg .ts .mts .m2ts .vob .ogv .asf .rm .rmvb"
)
_UNREAD_SUFFIXES = frozenset(_NOT_READ.split())
"""Pictures and clips of formats that are not read."""
CAPTION_SUFFIXES = (".txt", ".caption")
"""Of the file beside a medium, in any case; the first that is there counts."""
HEADERS_FILE = "media_headers-2.json"
"""Where `cache_dir` keeps headers of media; the number changes with what they say."""
METADATA = tuple(f"metadata{suffix}" for suffix in (".jsonl", ".csv", ".parquet"))
"""Tables of an image folder (`datasets`); their paths start where they lie."""

_KEY = "data.dataset_param.basic_parameters.dataset"
_REPEATED = re.compile(r"(\d+)_(.+)")
_NAMES_SHOWN = 3
_CONVERT = "Convert it to a format that is read (PNG, JPEG, WebP, TIFF, AVIF; MP4, MKV, WebM), or take it out."
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
        found: Its files.
        default: Caption of media without a text file; None: such a medium is a bad row.
    """

    def __init__(self, path: Path, name: str, found: FilesOfFolder, default: str | None = None) -> None:
        self.path, self.name, self._default = path, name, default
        self._media = sorted((*found.media, *found.unread))
        self._unread = frozenset(found.unread)
        self._captions = [found.captions.get(_stem(medium)) for medium in self._media]

    def __len__(self) -> int:
        return len(self._media)

    def place(self, index: int) -> RowLocation:
        """Return the place of medium `index`, printed as its path that starts with the folder's name."""
        return FilePlace(f"{self.name}/{self._media[index]}", index + 1)

    def read(self, index: int) -> JsonObject:
        """Medium `index` as `path` and `captions`; each line of the text is a caption of its own.

        Raises:
            DataError: It has no text file, or one that cannot be read.
        """
        medium, caption = self._media[index], self._captions[index]
        if medium in self._unread:
            raise _not_read(medium, str(self.place(index)))
        if caption is not None:
            return {"path": medium, "captions": _lines(_read_text(self.path / caption))}
        if self._default is None:
            raise DataError(
                f"the medium has no caption: there is no {_stem(medium)}.txt beside it",
                where=str(self.place(index)),
                way_out="Write one (an empty file trains it without a caption), or give all one caption: "
                "dataset: [{path: FOLDER, caption: TEXT}], or trigger_word.",
            )
        return {"path": medium, "captions": [self._default]}

    def facts(self) -> JsonObject:
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

    def read(self, index: int) -> JsonObject:
        """Sample `index`; media as paths through the archive.

        Raises:
            DataError: A text or a JSON member cannot be read.
        """
        _, parts = self._samples[index]
        row: JsonObject = {}
        if all(f".{ending}" in _UNREAD_SUFFIXES or not _is_medium(f".{ending}") for ending in parts):
            unread = next(member for ending, member in parts.items() if f".{ending}" in _UNREAD_SUFFIXES)
            raise _not_read(unread, str(self.place(index)))
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
                row["cap"] = _lines(_utf8_text(self._bytes(caption), f"{self.name}/{caption}"))
                break
        return row

    def _columns(self, member: str, index: int) -> JsonObject:
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
    alone = []
    for name, parts in samples.items():
        if any(_is_medium(f".{ending}") or f".{ending}" in _UNREAD_SUFFIXES for ending in parts):
            yield name, parts
        elif any(f".{ending}" in CAPTION_SUFFIXES for ending in parts):
            alone.append(name)
    _warn_of_texts(alone)


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
        found = FilesOfFolder.of(files)
        stems = {_stem(name) for name in (*found.media, *found.unread)}
        captioned |= bool(stems) and _REPEATED.fullmatch(folder.name) is not None
        captioned |= not stems.isdisjoint(found.captions)
        tables += [folder / name for name in files if _is_table(name) and _stem(name) not in stems]
    if captioned and tables:
        raise DataError(
            f"the folder holds media with text files, and the table {tables[0].relative_to(path)}",
            where=str(path),
            key=_KEY,
            way_out="Name the table, or take it out of the folder.",
        )
    return captioned or not tables


def open_media_folder(
    path: Path, apart: frozenset[Path] = frozenset(), caption: str | None = None, *, has_trigger: bool = False
) -> Iterator[tuple[CaptionedFolder | TarSamples | Path, Path, int]]:
    """What a folder holds: a `metadata` table, an archive, or a folder of captioned media; the folder that its paths
    start at; and how often an epoch reads it.

    Args:
        path: The folder.
        apart: Absolute paths of folders inside that are left out.
        caption: Of all media without a text file.
        has_trigger: Whether the trigger word alone does for a folder without any text file.

    Raises:
        DataError: It holds no media, or pictures for regularisation among them.
    """
    has_any = False
    alone: list[str] = []
    for here, files in _walk(path, apart):
        tables = [name for name in METADATA if name in files]
        archives = [name for name in files if name.endswith(TAR_SUFFIX)]
        found = FilesOfFolder.of(files)
        media = (*found.media, *found.unread)
        has_any |= bool(tables or archives or media)
        if tables:
            yield here / tables[0], here, 1
        elif archives:
            for name in archives:
                yield TarSamples(here / name), here, 1
        elif media and not _is_below_table(here, path):
            default, repeats = caption, 1
            if named := _REPEATED.fullmatch(here.name):
                if here.parent.name == "reg" and here.parent != path:
                    raise _for_regularisation(here, path)
                default, repeats = caption or named[2].replace("_", " "), int(named[1])
                if not repeats:  # as kohya's scripts do
                    warnings.warn(f"{here.name} is left out: its name asks for 0 repeats", stacklevel=2)
                    continue
            if default is None and has_trigger and not found.captions:
                default = ""
            name = here.relative_to(path.parent).as_posix()
            stems = set(map(_stem, media))
            alone += [f"{name}/{text}" for stem, text in found.captions.items() if stem not in stems]
            yield CaptionedFolder(here, name, found, default), here, repeats
    _warn_of_texts(alone)
    if not has_any:
        raise DataError(
            "the folder holds neither media nor tables of them",
            where=str(path),
            key=_KEY,
            way_out="Put pictures or clips there with a .txt of the same name beside each, or a metadata.jsonl.",
        )


def _for_regularisation(folder: Path, path: Path) -> DataError:
    """`reg/1_dog` beside `img/10_sks dog` is how kohya_ss's GUI lays out pictures for regularisation
    (`dreambooth_folder_creation_gui`), which sd-scripts is given apart, by `--reg_data_dir`."""
    subject = path
    if (path / "img").is_dir():
        subject = path / "img"
    return DataError(
        f"{folder.relative_to(path)} holds regularisation pictures, by the names of kohya's tools, not ordinary data",
        where=str(path),
        key=_KEY,
        way_out=f"Name both: dataset: [{{path: {subject}}}, {{path: {folder.parent}, prior: true}}], and set "
        "training.diffusion.prior_loss_weight: 1.0.",
    )


def _not_read(medium: str, where: str) -> DataError:
    return DataError(f"'{medium}': {_ending(medium)} files are not read", where=where, way_out=_CONVERT)


def _warn_of_texts(alone: Sequence[str]) -> None:
    """Text files without a medium are perhaps notes, perhaps captions of media that are lost."""
    if alone:
        shown = ", ".join(alone[:_NAMES_SHOWN])
        if len(alone) > _NAMES_SHOWN:
            shown += " …"
        has = by_count(len(alone), "text file has", "text files have")
        warnings.warn(f"{len(alone)} {has} no picture or clip of the same name: {shown}", stacklevel=2)


def _is_below_table(folder: Path, root: Path) -> bool:
    """Whether the media are those of a `metadata` table further up."""
    for above in (folder, *folder.parents):
        if any((above / name).is_file() for name in METADATA):
            return True
        if above == root:
            break
    return False


def _walk(path: Path, apart: frozenset[Path] = frozenset()) -> Iterator[tuple[Path, list[str]]]:
    """Folders with their files in the order of their names, without what is hidden, apart, or our own output; of a root
    of kohya_ss without its logs and models. Links to folders are not followed; one that leads to media is told."""
    for folder, folders, files in os.walk(path):
        here = Path(folder)
        is_root_of_kohya = "img" in folders and any(map(_REPEATED.fullmatch, os.listdir(here / "img")))  # noqa: PTH208
        # In place: os.walk goes into the folders that are left in this list, in its order.
        folders[:] = [name for name in sorted(folders) if not (is_root_of_kohya and name in ("log", "model"))]
        folders[:] = [name for name in folders if _is_shown(name) and _is_data(here / name, apart)]
        for link in filter(Path.is_symlink, (here / name for name in folders)):
            if any(_is_medium(name) for _, _, names in os.walk(link) for name in names):
                what = f"'{link}' is a link to a folder: its media are not read unless {_KEY} names it"
                warnings.warn(what, stacklevel=2)
        yield here, [name for name in sorted(files) if _is_shown(name)]


def _is_data(folder: Path, apart: frozenset[Path]) -> bool:
    return folder.absolute() not in apart and not is_output(folder)


def _is_shown(name: str) -> bool:
    return not name.startswith(".")


def _is_table(name: str) -> bool:
    return name.endswith(SUFFIXES) and name not in (INFO_FILE, HEADERS_FILE)


def _is_medium(name: str) -> bool:
    return _ending(name).lower() in MEDIA_SUFFIXES or name.lower() in MEDIA_SUFFIXES


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]  # noqa: PTH122


def _ending(name: str) -> str:
    return os.path.splitext(name)[1]  # noqa: PTH122


def _precedence(text_file: str) -> tuple[int, bool]:
    """By suffix; of those that differ in case the usual one first."""
    ending = _ending(text_file)
    return CAPTION_SUFFIXES.index(ending.lower()), ending != ending.lower()


@dataclass(frozen=True)
class FilesOfFolder:
    """The files of one folder, by what they are."""

    media: tuple[str, ...]
    unread: tuple[str, ...]
    """Pictures and clips of formats that are not read, and of which no other file is."""
    captions: Mapping[str, str]
    """Name without its ending → text file."""

    @classmethod
    def of(cls, names: Iterable[str]) -> FilesOfFolder:
        """Sort files by their names."""
        media, others, texts = list[str](), list[str](), list[str]()
        for name in names:
            ending = _ending(name).lower()
            if _is_medium(name):
                media.append(name)
            elif ending in _UNREAD_SUFFIXES:
                others.append(name)
            elif ending in CAPTION_SUFFIXES:
                texts.append(name)
        captions: dict[str, str] = {}
        for name in sorted(texts, key=_precedence):
            captions.setdefault(_stem(name), name)
        stems = set(map(_stem, media))
        return cls(tuple(media), tuple(name for name in others if _stem(name) not in stems), captions)


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_CAPTION_BYTES:
            raise DataError("is too long for a caption", where=str(path))
        return _utf8_text(path.read_bytes(), str(path))
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error


def _utf8_text(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"byte {error.start} is not UTF-8", where=where, way_out="Save the file as UTF-8.") from error


def _lines(text: str) -> list[str]:
    """The lines that say something; one empty caption where none does."""
    return [line.strip() for line in text.splitlines() if line.strip()] or [""]
