"""Which files the entries of `dataset:` name, and in which format their rows are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.folder_kinds import is_output
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.core.suggest import nearest
from mindspeed_mm.fsdp.data.data_utils.rows.dataset_lists import listed_sets
from mindspeed_mm.fsdp.data.data_utils.rows.formats import RowFormat
from mindspeed_mm.fsdp.data.data_utils.rows.readers import SUFFIXES
from mindspeed_mm.fsdp.params.data_args import DataEntry

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
    return Path("data" if dataset_dir is None else dataset_dir)


def _entries(dataset: Named) -> list[str | DataEntry]:
    """One for each source; commas part entries unless a file is called so."""
    if isinstance(dataset, str):
        dataset = [dataset] if Path(dataset).exists() else dataset.split(",")
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
    info: Mapping[str, Any]
    row_format: RowFormat
    is_whole: Callable[[Path], bool] | None


def _find(entry: str | DataEntry, search: _Search) -> list[RowSource]:
    """The source that an entry names; of a list of data sets all that it lists."""
    if not isinstance(entry, str):
        if search.is_whole is None:
            _check_no_media_keys(entry)
        found = _find(entry.path, search)
        attr = None if entry.attr is None else RowFormat.from_attr(entry.attr)
        return [_as_asked(each, entry, attr, is_alone=len(found) == 1) for each in found]
    dataset_dir, info = search.dataset_dir, search.info
    if entry in info:
        return [_described(entry, info[entry], dataset_dir)]
    for path in (Path(entry), dataset_dir / entry):
        if path.exists():
            return _of_path(entry, path, search)
    if _GLOB.search(entry):
        for folder, pattern in _glob_starts(entry, dataset_dir):
            files = tuple(sorted(path for path in folder.glob(pattern) if path.is_file()))
            if files:
                return [RowSource(entry, files, search.row_format)]
    raise DataError(f"'{entry}' does not exist", key=_KEY, way_out=_nearest_source(entry, search))


def _of_path(entry: str, path: Path, search: _Search) -> list[RowSource]:
    if path.is_dir() and search.is_whole is not None and search.is_whole(path):
        return [RowSource(entry, (path,), search.row_format)]
    listed = listed_sets(path) if path.is_file() and search.is_whole is None else None
    if listed is None:
        return [RowSource(entry, _files(path), search.row_format)]
    return [RowSource(one.name, _files(one.path), search.row_format, one.most, one.media_root) for one in listed]


def _as_asked(source: RowSource, entry: DataEntry, attr: RowFormat | None, *, is_alone: bool) -> RowSource:
    """A source with what a section of `dataset` says of it."""
    name = source.name
    if entry.name:
        name = entry.name if is_alone else f"{entry.name}/{source.name}"
    return replace(
        source,
        name=name,
        row_format=source.row_format if attr is None else attr,
        most=entry.max_samples or source.most,
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


def _check_no_media_keys(entry: DataEntry) -> None:
    for name in ("repeats", "sizes", "companions", "caption"):
        if entry[name] is not None:
            raise ConfigError(
                "is for data of generators (dataset_type: generation)",
                key=f"{_KEY}.{entry.name or entry.path}.{name}",
                way_out="Leave it out; mix.weights sets the shares of several datasets.",
            )


def _glob_starts(entry: str, dataset_dir: Path) -> list[tuple[Path, str]]:
    """Folders from which a pattern is tried, with the pattern below each."""
    path = Path(entry)
    if path.is_absolute():
        return [(Path(path.anchor), str(path.relative_to(path.anchor)))]
    return [(Path(), entry), (dataset_dir, entry)]


def _described(name: str, entry: object, dataset_dir: Path) -> RowSource:
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
    """Files of rows in a folder and the folders inside, those of our own output left out."""
    for file in folder.iterdir():
        if file.is_dir() and not file.is_symlink():
            if not is_output(file):
                yield from _row_files(file)
        elif _holds_rows(file):
            yield file


def _holds_rows(path: Path) -> bool:
    return path.suffix in SUFFIXES and path.name != INFO_FILE and path.is_file()


def _read_info(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return read_json_object(path, DataError, way_out="It lists data sets by name.")
