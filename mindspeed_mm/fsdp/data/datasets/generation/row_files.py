"""Files of rows for generation: what the readers of all data sets take, folders of media, archives, and two kinds of
.txt files.

`combine`: each line is `folder,annotation file`; the paths in the annotations start at the folder.
`standard`: a table in any format; a .txt table has `file<TAB>caption` lines, or paths alone beside a file of captions.

Folders beside them may hold media that belong to those of a data set by their names: masks, control videos, pictures
before an edit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.fsdp.data.data_utils.rows.formats import RowFormat
from mindspeed_mm.fsdp.data.data_utils.rows.readers import SUFFIXES, RowReader, file_facts, open_reader
from mindspeed_mm.fsdp.data.data_utils.rows.sources import RowSource, find_sources, rows_folder
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation
from mindspeed_mm.fsdp.data.data_utils.tar_members import SUFFIX as TAR_SUFFIX
from mindspeed_mm.fsdp.data.datasets.generation.media_folders import (
    MEDIA_SUFFIXES,
    METADATA,
    TarSamples,
    holds_media,
    open_media_folder,
)
from mindspeed_mm.fsdp.params.data_args import CAPTIONS_OF_LISTS, BasicParameters, DataEntry

_MODE_KEY = "data.dataset_param.basic_parameters.data_storage_mode"
_MODES = ("standard", "combine")


@dataclass(frozen=True)
class RowFile:
    """A file of rows, and the folder that its relative paths start at."""

    reader: RowReader
    folder: str = ""
    """From the media root, or absolute; empty: the media root itself."""
    repeats: int = 1
    """How often an epoch reads each row."""
    is_prior: bool = False
    """Whether the rows preserve the prior."""
    sizes: JsonMapping = field(default_factory=dict)
    """Keys of `preprocess_parameters` about sizes that are others for these rows."""
    entry: str = ""
    """The entry of `dataset` that names it, as `mix.weights` calls it."""
    most: int | None = None
    """Rows beyond are left out."""
    root: str = ""
    """The folder above the data set, where its own path is the beginning of its media's: these are called by what
    follows, so that features stay those of a data set that is moved."""

    companions: tuple[CompanionFolder, ...] = ()
    """Folders of further media of its rows."""
    caption: str | None = None
    """Of rows that have none."""

    def told(self, medium: str | bytes) -> str:
        """What to call a medium; empty: by its path."""
        if isinstance(medium, bytes):
            return ""
        for root in (self.root, *(str(each.path.parent) for each in self.companions)):
            if root and medium.startswith(root):
                return medium.removeprefix(root).lstrip("/")
        return ""

    @property
    def media_root(self) -> str | None:
        """A folder that its media may lie in, beside those that the configuration names."""
        if Path(self.folder).is_absolute():
            return self.folder
        return None

    def facts(self, cache_dir: str | None) -> JsonObject:
        """What a resumed run compares; see `file_facts`."""
        facts = {**file_facts(self.reader, cache_dir), "folder": self.folder, "repeats": self.repeats}
        if self.companions:
            facts["companions"] = [each.facts() for each in self.companions]
        return facts


class TextTable:
    """A .txt file with `file<TAB>caption` lines (or `file,caption`, cut at the first comma), or of paths alone beside a
    file of as many captions (`CAPTIONS_OF_LISTS`).

    Raises:
        DataError: A file is empty or not UTF-8, or there are more captions than paths, or fewer.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        self._lines = _lines(path)
        self._captions = self._captions_beside()

    def _captions_beside(self) -> list[str] | None:
        """The lines of `prompts.txt` beside a file of paths alone, as CogVideoX's scripts have them; None where each
        line of the file has its caption."""
        found = [self.path.with_name(name) for name in CAPTIONS_OF_LISTS if name != self.name]
        beside = next((each for each in found if each.is_file()), None)
        if beside is None or any(mark in self._lines[0][1] for mark in "\t,"):
            return None
        captions = [line for _, line in _lines(beside)]
        if len(captions) != len(self._lines):
            raise DataError(
                f"{len(captions)} captions, and {len(self._lines)} paths in {self.name}",
                where=beside.name,
                way_out="Write a line of each for every clip.",
            )
        return captions

    def __len__(self) -> int:
        return len(self._lines)

    def place(self, index: int) -> RowLocation:
        """Return the file's name and the line that row `index` stands on."""
        return RowLocation(self.path.name, self._lines[index][0])

    def raw(self, index: int) -> bytes:
        """The line of row `index`, with its caption where that is in a file of its own."""
        line = self._lines[index][1]
        return (line if self._captions is None else f"{line}\t{self._captions[index]}").encode()

    def read(self, index: int) -> JsonObject:
        """Row `index` as `file` and `captions`."""
        number, line = self._lines[index]
        if self._captions is not None:
            return {"file": line.strip(), "captions": self._captions[index].strip()}
        file, separator, caption = line.partition("\t")
        if not separator:
            file, separator, caption = line.partition(",")
        if not separator:
            raise DataError(
                f"'{line[:60]}' is not a file and a caption",
                where=f"{self.path.name}:{number}",
                way_out="Separate them by a tab.",
            )
        return {"file": file.strip(), "captions": caption.strip()}


def open_row_files(basic: BasicParameters) -> list[RowFile]:
    """All files of rows that the configuration names.

    Raises:
        DataError: A file is missing, empty or broken as a whole.
        ConfigError: No file is named, or the storage mode is unknown or does not fit.
    """
    mode = basic.get("data_storage_mode")
    if mode not in (None, *_MODES):
        raise ConfigError(f"'{mode}' is not one of {', '.join(_MODES)}", key=_MODE_KEY)
    opened: list[RowFile] = []
    for source in row_sources(basic):
        opened += _of_source(source, mode, basic)
    return opened


def row_sources(basic: BasicParameters) -> list[RowSource]:
    """What the entries of `dataset` name. Raises as `find_sources`."""
    return find_sources(basic.dataset, basic.dataset_dir, RowFormat(), holds_media)


def _of_source(source: RowSource, mode: str | None, basic: BasicParameters) -> Iterator[RowFile]:
    """The files of rows behind an entry, as the entry wants them read."""
    left, given = source.most, source.entry or DataEntry(path=str(source.files[0]))
    companions = open_companions(given.companions, source.files[0], basic.dataset_dir, source.name)
    apart = frozenset(each.path for each in companions)
    for path in source.files:
        for file in _open(path, mode, basic, apart, given.caption):
            if left == 0:
                return
            yield replace(
                file,
                repeats=file.repeats if given.repeats is None else given.repeats,
                is_prior=given.prior,
                sizes=given.sizes or {},
                entry=source.name,
                most=left,
                companions=companions,
                caption=given.caption,
            )
            if left is not None:
                left = max(0, left - len(file.reader))


def _open(
    path: Path, mode: str | None, basic: BasicParameters, apart: frozenset[Path], caption: str | None
) -> Iterator[RowFile]:
    if path.is_dir():
        for found, here, repeats in open_media_folder(
            path, apart, caption, has_trigger=bool(basic.get("trigger_word"))
        ):
            reader = open_reader(found, basic.cache_dir) if isinstance(found, Path) else found
            yield RowFile(reader, str(here.absolute()), repeats, root=str(path.absolute().parent))
    elif path.suffix == TAR_SUFFIX:
        folder = str(path.parent.absolute())
        yield RowFile(TarSamples(path), folder, root=folder)
    elif path.suffix.lower() != ".txt":
        if mode == "combine":
            raise ConfigError(
                f"combine, but {path.name} is no .txt file",
                key=_MODE_KEY,
                way_out="Give a .txt file of 'folder,annotation.json' lines, or leave the key out.",
            )
        folder = _beside(path, basic)
        yield RowFile(open_reader(path, basic.cache_dir), folder, root=folder)
    elif mode == "combine" or (mode is None and _lines(path)[0][1].rpartition(",")[2].strip().endswith(SUFFIXES)):
        for number, line in _lines(path):
            yield _annotation(line, f"{path.name}:{number}", path, basic)
    else:
        folder = _beside(path, basic)
        yield RowFile(TextTable(path), folder, root=folder)


def _beside(path: Path, basic: BasicParameters) -> str:
    """Where the media of a table are: in its folder, unless the configuration names another; media of a `metadata`
    table are always in its folder."""
    is_named = basic.dataset_dir is not None or basic.get("data_folder") is not None
    if is_named and path.name not in METADATA:
        return ""
    return str(path.parent.absolute())


def _annotation(line: str, where: str, listed_in: Path, basic: BasicParameters) -> RowFile:
    folder, separator, name = (part.strip() for part in line.rpartition(","))
    if not separator or not name:
        raise DataError(f"'{line[:60]}' is not 'folder,annotation file'", where=where)
    for base in (Path(), rows_folder(basic.dataset_dir), listed_in.parent):
        if (base / name).is_file():
            media, root = _media_folder(folder, listed_in, basic)
            return RowFile(open_reader(base / name, basic.cache_dir), media, root=root)
    raise DataError(
        f"the annotation file '{name}' is missing",
        where=where,
        way_out="Relative names start at the working directory, at "
        f"'{rows_folder(basic.dataset_dir)}' or at the folder of {listed_in.name}.",
    )


def _media_folder(folder: str, listed_in: Path, basic: BasicParameters) -> tuple[str, str]:
    """Where the media of an annotation file are, and the folder above: a relative folder starts at the media root that
    the configuration names, else at the working directory, else where the list lies."""
    roots = [Path(root) for root in (basic.get("data_folder"), basic.dataset_dir) if root is not None]
    if not folder or Path(folder).is_absolute() or any((root / folder).is_dir() for root in roots):
        return folder, ""
    for base in (Path(), listed_in.parent):
        if (base / folder).is_dir():
            return str((base / folder).absolute()), str(base.absolute())
    return folder, ""


def _lines(path: Path) -> list[tuple[int, str]]:
    """(number from 1, text) of the lines that are not blank."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"byte {error.start} is not UTF-8", where=str(path)) from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise DataError("the file is empty", where=str(path))
    return lines


# --- folders of companions --------------------------------------------------------------------------------------------


_ENTRIES = "data.dataset_param.basic_parameters.dataset"
SOUND_SUFFIXES = frozenset({".wav", ".flac", ".mp3", ".ogg", ".m4a", ".aac"})


class CompanionFolder:
    """The files that a column names by the names of the media which they lie beside.

    The file of `set/10_dog/a.png` is `10_dog/a.*` of the folder, else `a.*`: the longest end of the path counts.

    Args:
        column: That the files are of, as if the rows named them.
        path: The folder.
        key: Of the configuration, for messages.

    Raises:
        DataError: It is no folder, holds no media, or two files of one name.
    """

    def __init__(self, column: str, path: Path, key: str) -> None:
        self.column, self.path, self.key = column, path.absolute(), key
        if not path.is_dir():
            raise DataError(f"'{path}' is not a folder", key=key, way_out="Name the folder of these files.")
        self._files: dict[str, str] = {}
        for file in sorted(path.rglob("*")):
            if file.suffix.lower() not in MEDIA_SUFFIXES | SOUND_SUFFIXES or file.name.startswith("."):
                continue
            name = file.relative_to(path).with_suffix("").as_posix()
            if name in self._files:
                raise DataError(
                    f"'{self._files[name]}' and '{file.name}' have one name", key=key, way_out="Keep one of them."
                )
            self._files[name] = file.relative_to(path).as_posix()
        if not self._files:
            raise DataError(f"'{path}' holds no media", key=key, way_out="Name the folder of these files.")

    def of(self, medium: str | bytes, place: RowLocation) -> str:
        """Path of the file that lies beside a medium.

        Raises:
            DataError: There is none.
        """
        if isinstance(medium, str):
            parts = PurePath(medium).with_suffix("").parts
            for first in range(len(parts)):
                if (found := self._files.get("/".join(parts[first:]))) is not None:
                    return f"{self.path}/{found}"
        name = PurePath(medium).stem if isinstance(medium, str) else "a medium without a name"
        raise DataError(
            f"there is no '{name}' in '{self.path.name}'",
            where=str(place),
            key=self.column,
            way_out=f"Put it there, or take the row out. The folder is named in {self.key}.",
        )

    def facts(self) -> JsonObject:
        """Column, and the files with size and time of change."""
        marks = []
        for file in self._files.values():
            status = (self.path / file).stat()
            marks.append((file, status.st_size, status.st_mtime_ns))
        return {"column": self.column, "files": marks}


def open_companions(
    named: Mapping[str, str] | None, beside: Path, dataset_dir: str | None, entry: str
) -> tuple[CompanionFolder, ...]:
    """The folders that an entry of `dataset` names.

    Args:
        named: Column → folder, from the working directory, `dataset_dir`, or where the data set lies.
        beside: The data set.
        dataset_dir: Of the configuration.
        entry: Name of the entry.

    Raises:
        DataError: As `CompanionFolder`.
    """
    found = []
    for column, folder in (named or {}).items():
        tried = (Path(folder), Path(dataset_dir or "") / folder, beside / folder, beside.parent / folder)
        path = next((each for each in tried if each.is_dir()), Path(folder))
        found.append(CompanionFolder(column, path, f"{_ENTRIES}.{entry}.companions.{column}"))
    return tuple(found)
