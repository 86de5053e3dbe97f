"""Which files a `dataset:` entry names, and in which format their rows are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.suggest import nearest
from mindspeed_mm.fsdp.data.data_utils.readers import SUFFIXES

_KEY = "data.dataset_param.basic_parameters.dataset"
_ATTR_KEY = "data.dataset_param.attr"
INFO_FILE = "dataset_info.json"


@dataclass(frozen=True)
class RowFormat:
    """Where a row keeps what. `None` for a column: its usual names are tried."""

    formatting: str = "sharegpt"
    messages: str | None = None
    system: str | None = None
    images: str | None = None
    videos: str | None = None
    audios: str | None = None
    prompt: str | None = None
    query: str | None = None
    response: str | None = None
    history: str | None = None
    role_tag: str = "from"
    content_tag: str = "value"
    user_tag: str = "human"
    assistant_tag: str = "gpt"
    system_tag: str = "system"

    @classmethod
    def from_attr(cls, attr: Any) -> RowFormat:
        """From the `attr` section of the configuration."""
        if getattr(attr, "ranking", False):
            raise ConfigError("preference rows are not built yet", key=f"{_ATTR_KEY}.ranking", way_out="Set false.")
        found = {f.name: getattr(attr, f.name, None) for f in fields(cls)}
        return cls(**{name: value for name, value in found.items() if value is not None})

    @classmethod
    def from_dataset_info(cls, entry: dict[str, Any]) -> RowFormat:
        """From an entry of a LLaMA-Factory `dataset_info.json`."""
        if entry.get("ranking"):
            raise ConfigError("preference rows are not built yet", where=INFO_FILE, key="ranking")
        known = {f.name for f in fields(cls)}
        found = {**entry.get("columns", {}), **entry.get("tags", {}), "formatting": entry.get("formatting", "alpaca")}
        return cls(**{name: value for name, value in found.items() if name in known and value is not None})


@dataclass(frozen=True)
class Source:
    """Files of rows in one format."""

    files: tuple[Path, ...]
    row_format: RowFormat


def find_sources(dataset: str | Sequence[str] | None, dataset_dir: str | Path, row_format: RowFormat) -> list[Source]:
    """The sources that `dataset` names: a file, a folder, a name of `dataset_info.json`, or several (list or commas).

    Args:
        dataset: As configured.
        dataset_dir: Relative entries are tried against the working directory, then against this folder.
        row_format: Of files that `dataset_info.json` does not describe.

    Raises:
        DataError: An entry names nothing; the nearest names are shown.
    """
    entries = dataset.split(",") if isinstance(dataset, str) else list(dataset or [])
    entries = [str(entry).strip() for entry in entries if str(entry).strip()]
    if not entries:
        raise ConfigError("no data set is named", key=_KEY, way_out="Give a file, a folder or a list of them.")
    info = _read_info(Path(dataset_dir) / INFO_FILE)
    return [_find(entry, Path(dataset_dir), info, row_format) for entry in entries]


def _find(entry: str, dataset_dir: Path, info: dict[str, Any], row_format: RowFormat) -> Source:
    if entry in info:
        described = info[entry]
        if "file_name" not in described:
            raise DataError(f"'{entry}' has no file_name", where=INFO_FILE, way_out="Only local files are read.")
        return Source(_files(dataset_dir / described["file_name"]), RowFormat.from_dataset_info(described))
    for path in (Path(entry), dataset_dir / entry):
        if path.exists():
            return Source(_files(path), row_format)
    beside = [p.name for p in dataset_dir.iterdir()] if dataset_dir.is_dir() else []
    near = nearest(Path(entry).name, [*beside, *info])
    hint = f"Did you mean '{near[0]}'?" if near else f"Relative names start here or at dataset_dir, '{dataset_dir}'."
    raise DataError(f"'{entry}' does not exist", key=_KEY, way_out=hint)


def _files(path: Path) -> tuple[Path, ...]:
    if path.is_file():
        return (path,)
    files = tuple(sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.name != INFO_FILE and p.is_file()))
    if not files:
        raise DataError(f"the folder holds no {', '.join(SUFFIXES)} file", where=str(path), key=_KEY)
    return files


def _read_info(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"broken JSON: {error}", where=str(path)) from error
    if not isinstance(info, dict):
        raise DataError("is not an object of data sets", where=str(path))
    return info
