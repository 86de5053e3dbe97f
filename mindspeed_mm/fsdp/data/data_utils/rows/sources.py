"""Which files the entries of `dataset:` name, and in which format their rows are.

An entry may be a file that lists data sets instead of holding rows: InternVL's meta file (`internvl_chat_finetune.py`:
`{"name": {"root", "annotation", "repeat_time", "length", …}}`) and LLaVA-NeXT's data YAML (`train.py`: `datasets:
[{json_path, sampling_strategy}]`). A JSON list of such objects is read, too; and a text file with one file of rows a
line, as CosyVoice's recipes write it (`data.list`).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.folder_kinds import is_output
from mindspeed_mm.core.json_file import JsonMapping, JsonObject, parse_json, read_json_object
from mindspeed_mm.core.suggest import nearest
from mindspeed_mm.fsdp.data.data_utils.rows.formats import RowFormat
from mindspeed_mm.fsdp.data.data_utils.rows.readers import SUFFIXES
from mindspeed_mm.fsdp.params.data_args import DataEntry
from mindspeed_mm.fsdp.params.yaml.parser import parse_yaml
from mindspeed_mm.fsdp.params.yaml.tree import plain

_KEY = "data.dataset_param.basic_parameters.dataset"
INFO_FILE = "dataset_info.json"
_GLOB = re.compile(r"[*?\[]")
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\.\w+")
"""How shards of a Hugging Face data set are called: `train-00000-of-00002.parquet`."""
_HUB_KEYS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")


@dataclass(frozen=True)
class RowSource:
    """An entry of `dataset:`: files of rows in one format."""

    name: str
    """As written; `mix.weights` calls it so."""
    files: tuple[Path, ...]
    row_format: RowFormat
    most: int | None = None
    """Rows beyond are left out."""
    media_root: Path | None = None
    """Where its media are, if what names it says so."""
    share: float | None = None
    """Share of its rows that is taken, from the first on; None: all."""
    repeats: int = 1
    """How often an epoch reads each row."""
    entry: DataEntry | None = None
    """The section that describes it, where one does."""


Named = str | Sequence[str | DataEntry] | None
"""What `dataset` may be."""


def find_sources(
    dataset: Named,
    dataset_dir: str | Path | None,
    row_format: RowFormat,
    is_whole: Callable[[Path], bool] | None = None,
) -> list[RowSource]:
    """The sources that `dataset` names: one entry, or several (list or commas).

    An entry is a file, a folder, a pattern (`part-*.parquet`), a name of `dataset_info.json`, a file that lists data
    sets, or a section with `path` and what is special about it: `name`, `attr`, `max_samples`.

    Args:
        dataset: As configured.
        dataset_dir: Relative entries are tried against the working directory, then against this folder; None: `data`.
        row_format: Of entries that neither bring their own nor stand in `dataset_info.json`.
        is_whole: Tells folders of media, which are read by themselves (data of generators); None: there are none.

    Raises:
        DataError: An entry names nothing; the nearest names are shown.
        ConfigError: No entry, or two of one name.
    """
    entries = _entries(dataset)
    if not entries:
        raise ConfigError("no data set is named", key=_KEY, way_out="Give a file, a folder or a list of them.")
    folder = rows_folder(dataset_dir)
    search = _Search(folder, _read_info(folder / INFO_FILE), row_format, is_whole)
    sources = list(chain.from_iterable(_find(entry, search) for entry in entries))
    seen: set[str] = set()
    for source in sources:
        if source.name in seen:
            raise ConfigError(f"'{source.name}' is named twice", key=_KEY, way_out="Give entries a `name` each.")
        seen.add(source.name)
    return sources


def rows_folder(dataset_dir: str | Path | None) -> Path:
    """Where files of rows are looked for besides the working directory."""
    if dataset_dir is None:
        return Path("data")
    return Path(dataset_dir)


def _entries(dataset: Named) -> list[str | DataEntry]:
    """One for each source; commas part entries unless a file is called so."""
    if isinstance(dataset, str):
        named = [dataset]
        if not Path(dataset).exists():
            named = dataset.split(",")
        dataset = named
    entries: list[str | DataEntry] = []
    for entry in dataset or ():
        if isinstance(entry, str):
            entry = entry.strip()
        if entry:
            entries.append(entry)
    return entries


@dataclass(frozen=True)
class _Search:
    """Where entries are looked for, see `find_sources`."""

    dataset_dir: Path
    info: JsonMapping
    row_format: RowFormat
    is_whole: Callable[[Path], bool] | None


def _find(entry: str | DataEntry, search: _Search) -> list[RowSource]:
    """The source that an entry names; of a list of data sets all that it lists."""
    if not isinstance(entry, str):
        _check_keys(entry, of_media=search.is_whole is not None)
        found = _find(entry.path, search)
        attr = None
        if entry.attr is not None:
            attr = RowFormat.from_attr(entry.attr)
        return [_as_asked(each, entry, attr, is_alone=len(found) == 1) for each in found]
    dataset_dir, info = search.dataset_dir, search.info
    if entry in info:
        return [_described_source(entry, info[entry], dataset_dir)]
    for path in (Path(entry), dataset_dir / entry):
        if path.exists():
            return _of_path(entry, path, search)
    if _GLOB.search(entry):
        for folder, pattern in _glob_starts(entry, dataset_dir):
            files = tuple(sorted(path for path in folder.glob(pattern) if path.is_file()))
            if not _is_hidden(Path(pattern)):  # as in a shell
                files = tuple(path for path in files if not _is_hidden(path.relative_to(folder)))
            if files:
                return [RowSource(entry, files, search.row_format)]
    raise DataError(f"'{entry}' does not exist", key=_KEY, way_out=_nearest_source(entry, search))


def _of_path(entry: str, path: Path, search: _Search) -> list[RowSource]:
    if path.is_dir() and search.is_whole is not None and search.is_whole(path):
        return [RowSource(entry, (path,), search.row_format)]
    listed = None
    if path.is_file() and search.is_whole is None:
        listed = listed_sets(path)
    if listed is None:
        return [RowSource(entry, _files(path), search.row_format)]
    return [
        RowSource(one.name, _files(one.path), search.row_format, one.most, one.media_root, one.share, one.repeats)
        for one in listed
    ]


def _as_asked(source: RowSource, entry: DataEntry, attr: RowFormat | None, *, is_alone: bool) -> RowSource:
    """A source with what a section of `dataset` says of it."""
    name = source.name
    if entry.name:
        name = entry.name
        if not is_alone:  # a list of data sets: each keeps a name of its own
            name = f"{entry.name}/{source.name}"
    return replace(
        source,
        name=name,
        row_format=source.row_format if attr is None else attr,
        most=entry.max_samples or source.most,
        media_root=source.media_root if entry.media_dir is None else Path(entry.media_dir),
        share=entry.share or source.share,
        repeats=entry.repeats or source.repeats,
        entry=entry,
    )


def _nearest_source(entry: str, search: _Search) -> str:
    """The way out where an entry does not exist."""
    names = list(search.info)
    if search.dataset_dir.is_dir():
        names = [*(path.name for path in search.dataset_dir.iterdir()), *names]
    near = nearest(Path(entry).name, names)
    if near:
        return f"Did you mean '{near[0]}'?"
    return f"Relative names start here or at dataset_dir, '{search.dataset_dir}'."


_OF_MEDIA, _OF_CONVERSATIONS = ("sizes", "companions", "caption"), ("share", "media_dir")
"""Keys of an entry that only data sets of generators, or only the others, have."""


def _check_keys(entry: DataEntry, *, of_media: bool) -> None:
    """Raise `ConfigError` where an entry has a key that acts on data sets of the other kind alone."""
    others: tuple[str, ...] = _OF_MEDIA
    kind = "generators (dataset_type: generation)"
    if of_media:
        others, kind = _OF_CONVERSATIONS, "language models"
    for name in others:
        if entry[name] is not None:
            raise ConfigError(
                f"is for data of {kind}",
                key=f"{_KEY}.{entry.name or entry.path}.{name}",
                way_out="Leave it out; mix.weights sets the shares of several datasets.",
            )


def _glob_starts(entry: str, dataset_dir: Path) -> list[tuple[Path, str]]:
    """Folders from which a pattern is tried, with the pattern below each."""
    path = Path(entry)
    if path.is_absolute():
        return [(Path(path.anchor), str(path.relative_to(path.anchor)))]
    return [(Path(), entry), (dataset_dir, entry)]


def _is_hidden(path: Path) -> bool:
    """Whether a part of a path begins with a dot: copies of notebooks, facts of a file system."""
    return any(part.startswith(".") and part != ".." for part in path.parts)


def _described_source(name: str, entry: object, dataset_dir: Path) -> RowSource:
    """The source that an entry of `dataset_info.json` describes."""
    where = f"{INFO_FILE}: {name}"
    if not isinstance(entry, dict):
        raise DataError(f"is {entry!r}, not an object", where=where)
    if not isinstance(entry.get("file_name"), str):
        what, key = "has no file_name", "file_name"
        for remote in _HUB_KEYS:
            if remote in entry:
                what, key = f"{remote} is not followed: only local files are read", remote
                break
        way_out = "Download the data set beside dataset_info.json and give its file_name."
        raise ConfigError(what, where=where, key=key, way_out=way_out)
    folder = entry.get("subset") or entry.get("folder")
    path = dataset_dir / entry["file_name"] / (folder or "")
    if not path.exists():
        raise DataError(f"'{path}' does not exist", where=where, key="folder" if folder else "file_name")
    most = entry.get("num_samples")
    if most is not None and (not isinstance(most, int) or most < 1):
        raise ConfigError(f"{most!r} is not a number of samples", where=where, key="num_samples")
    return RowSource(name, _files(path, entry.get("split")), RowFormat.from_dataset_info(name, entry, INFO_FILE), most)


def _files(path: Path, split: str | None = None) -> tuple[Path, ...]:
    """The files of rows of a folder in order, or the file itself.

    Args:
        path: File or folder.
        split: Where the folder's shards are named by splits, the one to take.

    Raises:
        DataError: There is none, or there are several splits and none is chosen.
    """
    if path.is_file():
        if path.suffix == _LIST_SUFFIX:
            return _listed_files(path)
        return (path,)
    files = tuple(sorted(_row_files(path)))
    if not files:
        raise DataError(f"the folder holds no {', '.join(SUFFIXES)} file", where=str(path), key=_KEY)
    splits: dict[str, Path] = {}
    for file in files:
        if shard := _SHARD.fullmatch(file.name):
            splits[shard[1]] = file.parent
    if split is None and len(splits) > 1:
        first = sorted(splits)[0]
        raise DataError(
            f"the folder holds the splits {', '.join(sorted(splits))}",
            where=str(path),
            key=_KEY,
            way_out=f"Name one, for example '{splits[first] / first}-*'.",
        )
    if split is not None and splits:
        files = tuple(file for file in files if file.name.startswith(f"{split}-"))
    if not files:
        raise DataError(f"no split '{split}', only {', '.join(sorted(splits))}", where=str(path), key=_KEY)
    return files


def _row_files(folder: Path) -> Iterator[Path]:
    """Files of rows in a folder and the folders inside, without what is hidden and our own output. Links to folders are
    not followed, since they may lead round in a circle: one that leads to rows is told."""
    for file in folder.iterdir():
        if _is_hidden(Path(file.name)):
            continue
        if not file.is_dir():
            if _holds_rows(file):
                yield file
        elif not file.is_symlink():
            if not is_output(file):
                yield from _row_files(file)
        elif next(_row_files(file), None) is not None:
            warnings.warn(f"'{file}' is a link to a folder: its rows are not read unless {_KEY} names it", stacklevel=2)


def _holds_rows(path: Path) -> bool:
    return path.suffix in SUFFIXES and path.name != INFO_FILE and path.is_file()


def _read_info(path: Path) -> JsonObject:
    if not path.is_file():
        return {}
    return read_json_object(path, DataError, way_out="It lists data sets by name.")


# --- files that list others -------------------------------------------------------------------------------------------


_MOST_BYTES = 4 * 2**20
_FILE_KEYS = ("annotation", "annotation_path", "json_path", "dataset_path")
_ROOT_KEYS = ("root", "data_path", "image_folder", "media_dir")
_IGNORED_KEYS = ("name", "length", "data_augment", "repeat_time", "sampling_strategy", "sampling_rate")
_LIST_KEYS = frozenset({*_FILE_KEYS, *_ROOT_KEYS, *_IGNORED_KEYS})
_OF_THE_RUN = {"max_dynamic_patch": "data.dataset_param.preprocess_parameters.image_max_tiles"}
"""Keys of a list that hold for the whole run here."""
_NAMED = re.compile("|".join(f'"?{name}"?\\s*:' for name in _FILE_KEYS).encode())
_FIRST = re.compile(r"(?:first:)?(\d+)")


_LIST_SUFFIX = ".list"


def _listed_files(path: Path) -> tuple[Path, ...]:
    """The files of rows that a text file names, one a line.

    Raises:
        DataError: It names none, one does not exist, or it is no text.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"cannot be read as text: {error}", where=str(path), key=_KEY) from error
    named = [(number, line.strip()) for number, line in enumerate(lines, start=1)]
    files = tuple(_located(Path(name), path, f"{path}:{number}") for number, name in named if name)
    if not files:
        raise DataError("names no files", where=str(path), key=_KEY, way_out="Write one file of rows a line.")
    return files


class ListedSet(NamedTuple):
    """A data set that a list names."""

    name: str
    path: Path
    media_root: Path | None
    """Where its media are; None: the list does not say."""
    most: int | None
    share: float | None
    repeats: int


def listed_sets(path: Path) -> list[ListedSet] | None:
    """The data sets that a file lists; None: it holds rows.

    Raises:
        ConfigError: An entry asks for something that is not done.
        DataError: The file cannot be read, or a file that it names does not exist.
    """
    is_yaml = path.suffix in (".yaml", ".yml")
    if not (is_yaml or path.suffix == ".json") or path.stat().st_size > _MOST_BYTES:
        return None
    content = path.read_bytes()
    # A search of bytes first: files of rows are not parsed twice.
    if not _NAMED.search(content):
        return None
    parsed = _parsed_yaml(path) if is_yaml else _parsed(content)
    entries = _listed_entries(parsed)
    if entries is None:
        return None
    return [_listed(name, entry, path) for name, entry in entries.items()]


def _parsed(content: bytes) -> Any:
    try:
        return parse_json(content)
    except ValueError:  # an object per line, or broken: its reader says what
        return None


def _parsed_yaml(path: Path) -> object:
    try:
        return plain(parse_yaml(path.read_text(encoding="utf-8"), str(path)).root)
    except UnicodeDecodeError as error:
        raise DataError(f"cannot be read as YAML: {error}", where=str(path)) from error


def _listed_entries(content: object) -> dict[str, JsonMapping] | None:
    """Name → entry; None where the content is no list of data sets."""
    if isinstance(content, Mapping) and isinstance(content.get("datasets"), list):
        content = content["datasets"]
    if isinstance(content, list):
        content = {_name_of(entry, number): entry for number, entry in enumerate(content)}
    if not isinstance(content, Mapping) or not content:
        return None
    if not all(isinstance(entry, Mapping) and _given(entry, _FILE_KEYS) for entry in content.values()):
        return None
    return {str(name): entry for name, entry in content.items()}


def _name_of(entry: object, number: int) -> str:
    name = None
    if isinstance(entry, Mapping):
        name = entry.get("name")
    return str(name or number)


def _given(entry: JsonMapping, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if isinstance(entry.get(name), str) and entry[name]), None)


def _listed(name: str, entry: JsonMapping, listed_in: Path) -> ListedSet:
    where = f"{listed_in}: {name}"
    for key, value in entry.items():
        if key not in _LIST_KEYS:
            raise ConfigError(
                f"{value!r} is not obeyed",
                where=where,
                key=str(key),
                way_out=f"Take it out, and set {_OF_THE_RUN.get(key, 'what it is for')} in the YAML of the run.",
            )
    if entry.get("data_augment"):
        raise ConfigError("pictures are not augmented", where=where, key="data_augment", way_out="Set it to false.")
    file, root = entry[_given(entry, _FILE_KEYS) or ""], _given(entry, _ROOT_KEYS)
    path = _located(Path(file), listed_in, where)
    media = None
    if root is not None:
        media = _located(Path(entry[root]), listed_in, where)
    return ListedSet(name, path, media, *_taken_of(entry, where))


def _located(path: Path, listed_in: Path, where: str) -> Path:
    for each in (path, listed_in.parent / path):
        if each.exists():
            return each
    raise DataError(
        f"'{path}' does not exist",
        where=where,
        way_out=f"Paths start at the working directory, or at the folder of {listed_in.name}.",
    )


def _taken_of(entry: Mapping[str, object], where: str) -> tuple[int | None, float | None, int]:
    """The most rows that are taken, the share of them, and how often each is read."""
    times = entry.get("repeat_time", entry.get("sampling_rate", 1))
    strategy = str(entry.get("sampling_strategy") or "all")
    first = _FIRST.fullmatch(strategy)
    if strategy != "all" and first is None:
        raise ConfigError(
            f"'{strategy}' is not obeyed: rows are taken from the first on",
            where=where,
            key="sampling_strategy",
            way_out="Write all or first:NUMBER; mix.weights of the run's YAML sets shares.",
        )
    most = None
    if first:
        most = int(first[1])
    if isinstance(times, bool) or not isinstance(times, int | float) or times <= 0 or (times > 1 and times % 1):
        raise ConfigError(
            f"{times!r} is neither a share of the rows nor a whole number of times",
            where=where,
            key="repeat_time",
            way_out="Write a number from 0 to 1, or 2, 3 and so on.",
        )
    if times >= 1:
        return most, None, int(times)
    length = entry.get("length")
    if isinstance(length, int):  # known before the rows are read, as streaming needs it
        return max(1, int(length * times)), None, 1
    return most, float(times), 1
