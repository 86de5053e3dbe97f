"""Which files the entries of `dataset:` name, and in which format their rows are."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.folder_kinds import is_output
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.core.suggest import nearest
from mindspeed_mm.fsdp.data.data_utils.rows.readers import SUFFIXES
from mindspeed_mm.fsdp.params.data_args import DataEntry
from mindspeed_mm.fsdp.params.value_types import Section

_KEY = "data.dataset_param.basic_parameters.dataset"
INFO_FILE = "dataset_info.json"
_GLOB = re.compile(r"[*?\[]")
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\.\w+")
"""How shards of a Hugging Face data set are called: `train-00000-of-00002.parquet`."""
_HUB_KEYS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")


class FlatColumns(NamedTuple):
    """The columns of a format whose rows hold no list of turns: key of `attr` → the usual name."""

    question: Mapping[str, str]
    """What is asked, in the order in which it is joined; the first is needed."""
    answer: Mapping[str, str]
    """The one column of what is answered."""


FORMATS: dict[str, FlatColumns | None] = {
    "sharegpt": None,
    "alpaca": FlatColumns({"prompt": "instruction", "query": "input"}, {"response": "output"}),
    "openai": None,
    "multimodal_tool": None,
}
"""`attr.formatting` → the columns of a row; None: a list of turns, in `messages`."""


@dataclass(frozen=True)
class RowFormat:
    """Where a row keeps what. A column: `None`: its usual names are tried; empty: the rows have none."""

    formatting: str = "sharegpt"
    ranking: bool = False
    messages: str | None = None
    system: str | None = None
    tools: str | None = None
    images: str | None = None
    videos: str | None = None
    audios: str | None = None
    prompt: str | None = None
    query: str | None = None
    response: str | None = None
    history: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    role_tag: str = "from"
    content_tag: str = "value"
    user_tag: str = "human"
    assistant_tag: str = "gpt"
    observation_tag: str = "observation"
    function_tag: str = "function_call"
    system_tag: str = "system"

    @classmethod
    def from_attr(cls, attr: Section) -> RowFormat:
        """From the `attr` section of the configuration."""
        names = {field.name for field in fields(cls)}
        return cls(**_given(attr, names))

    @classmethod
    def from_dataset_info(cls, name: str, entry: Mapping[str, Any]) -> RowFormat:
        """From an entry of a LLaMA-Factory `dataset_info.json`.

        As there, an entry that lists its columns has only those.

        Raises:
            ConfigError: A format, column or tag is unknown.
        """
        where = f"{INFO_FILE}: {name}"
        formatting = entry.get("formatting", "alpaca")
        _check_known([formatting], list(FORMATS), where, "formatting")
        columns, tags = entry.get("columns"), entry.get("tags") or {}
        found: dict[str, Any] = {}
        if columns is not None:
            _check_known(columns, _COLUMNS, where, "columns")
            found = dict.fromkeys(_OPTIONAL_COLUMNS, "") | _given(columns, _COLUMNS)
        _check_known(tags, _TAGS, where, "tags")
        found |= _given(tags, _TAGS)
        return cls(**found, formatting=formatting, ranking=bool(entry.get("ranking", False)))

    @property
    def needed_columns(self) -> tuple[str, ...]:
        """Columns without which no row converts, as far as they are named."""
        keys = ["messages"]
        if self.ranking:
            keys = ["chosen", "rejected"]
        elif flat := FORMATS[self.formatting]:
            keys = [*list(flat.question)[:1], *flat.answer]
        named = [vars(self)[key] for key in keys]
        return tuple(filter(None, named))

    @property
    def question_columns(self) -> tuple[str, ...]:
        """Where a row has what is asked; empty: in its list of turns."""
        flat = FORMATS[self.formatting]
        return () if flat is None else self._names_of(flat.question)

    @property
    def answer_column(self) -> str:
        """Where a row has what is answered; empty: at the end of its list of turns."""
        flat = FORMATS[self.formatting]
        return "" if flat is None else self._names_of(flat.answer)[0]

    def _names_of(self, usual: Mapping[str, str]) -> tuple[str, ...]:
        names = []
        for key, name in usual.items():
            given = vars(self)[key]
            names.append(name if given is None else given)
        return tuple(names)


_TAGS = tuple(f.name for f in fields(RowFormat) if f.name.endswith("_tag"))
_COLUMNS = tuple(f.name for f in fields(RowFormat) if f.name not in ("formatting", "ranking", *_TAGS))
_OPTIONAL_COLUMNS = ("system", "tools", "images", "videos", "audios", "query", "history")


def _given(section: Mapping[str, Any] | Section, names: Collection[str]) -> dict[str, Any]:
    """Those of these entries that are there and not null."""
    return {name: value for name, value in section.items() if name in names and value is not None}


def _check_known(names: Iterable[str], known: Sequence[str], where: str, key: str) -> None:
    for name in names:
        if name not in known:
            near = nearest(str(name), known)
            way_out = f"Did you mean '{near[0]}'?" if near else f"Known: {', '.join(known)}."
            raise ConfigError(f"'{name}' is not known here", where=where, key=key, way_out=way_out)


@dataclass(frozen=True)
class RowSource:
    """An entry of `dataset:`: files of rows in one format."""

    name: str
    """As written; `mix.weights` calls it so."""
    files: tuple[Path, ...]
    row_format: RowFormat
    most: int | None = None
    """Rows beyond are left out."""
    entry: DataEntry | None = None
    """The section that describes it, where one does."""


Named = str | Sequence[str | DataEntry] | None
"""What `dataset` may be."""


def find_sources(
    dataset: Named, dataset_dir: str | Path, row_format: RowFormat, is_whole: Callable[[Path], bool] | None = None
) -> list[RowSource]:
    """The sources that `dataset` names: one entry, or several (list or commas).

    An entry is a file, a folder, a pattern (`part-*.parquet`), a name of `dataset_info.json`, or a section with `path`
    and what is special about it: `name`, `attr`, `max_samples`.

    Args:
        dataset: As configured.
        dataset_dir: Relative entries are tried against the working directory, then against this folder.
        row_format: Of entries that neither bring their own nor stand in `dataset_info.json`.
        is_whole: Tells folders of media, which are read by themselves (data of generators); None: there are none.

    Raises:
        DataError: An entry names nothing; the nearest names are shown.
        ConfigError: No entry, or two of one name.
    """
    entries = _entries(dataset)
    if not entries:
        raise ConfigError("no data set is named", key=_KEY, way_out="Give a file, a folder or a list of them.")
    info = _read_info(Path(dataset_dir) / INFO_FILE)
    search = _Search(Path(dataset_dir), info, row_format, is_whole)
    sources = [_find(entry, search) for entry in entries]
    seen: set[str] = set()
    for source in sources:
        if source.name in seen:
            raise ConfigError(f"'{source.name}' is named twice", key=_KEY, way_out="Give entries a `name` each.")
        seen.add(source.name)
    return sources


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


def _find(entry: str | DataEntry, search: _Search) -> RowSource:
    if not isinstance(entry, str):
        found = _find(entry.path, search)
        if search.is_whole is None:
            _check_no_media_keys(entry)
        own = found.row_format if entry.attr is None else RowFormat.from_attr(entry.attr)
        return RowSource(entry.name or found.name, found.files, own, entry.max_samples or found.most, entry)
    dataset_dir, info = search.dataset_dir, search.info
    if entry in info:
        return _described(entry, info[entry], dataset_dir)
    for path in (Path(entry), dataset_dir / entry):
        if path.exists():
            is_whole = path.is_dir() and search.is_whole is not None and search.is_whole(path)
            return RowSource(entry, (path,) if is_whole else _files(path), search.row_format)
    if _GLOB.search(entry):
        for folder, pattern in _glob_starts(entry, dataset_dir):
            files = tuple(sorted(path for path in folder.glob(pattern) if path.is_file()))
            if files:
                return RowSource(entry, files, search.row_format)
    raise DataError(f"'{entry}' does not exist", key=_KEY, way_out=_nearest_source(entry, search))


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
    return RowSource(name, _files(path, entry.get("split")), RowFormat.from_dataset_info(name, entry), most)


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
