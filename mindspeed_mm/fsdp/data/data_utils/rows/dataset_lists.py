"""Files that list data sets instead of holding rows: InternVL's meta file and LLaVA-NeXT's data YAML.

InternVL (`internvl_chat_finetune.py`): `{"name": {"root", "annotation", "repeat_time", "length", …}}`. LLaVA-NeXT
(`train.py`): `datasets: [{json_path, sampling_strategy}]`. A JSON list of such objects is read, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.fsdp.params.yaml.parser import parse_yaml
from mindspeed_mm.fsdp.params.yaml.tree import plain

_MOST_BYTES = 4 * 2**20
_FILES = ("annotation", "annotation_path", "json_path", "dataset_path")
_ROOTS = ("root", "data_path", "image_folder", "media_dir")
_IGNORED = ("name", "length", "data_augment", "repeat_time", "sampling_strategy", "sampling_rate")
_KEYS = frozenset({*_FILES, *_ROOTS, *_IGNORED})
_OF_THE_RUN = {"max_dynamic_patch": "data.dataset_param.preprocess_parameters.image_max_tiles"}
"""Keys of a list that hold for the whole run here."""
_NAMED = re.compile("|".join(f'"?{name}"?\\s*:' for name in _FILES).encode())
_FIRST = re.compile(r"(?:first:)?(\d+)")


class ListedSet(NamedTuple):
    """A data set that a list names."""

    name: str
    path: Path
    media_root: Path | None
    """Where its media are; None: the list does not say."""
    most: int | None


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
    if not _NAMED.search(content):
        return None
    entries = _entries(_parsed_yaml(path) if is_yaml else _parsed(content))
    return None if entries is None else [_listed(name, entry, path) for name, entry in entries.items()]


def _parsed(content: bytes) -> Any:
    try:
        return parse_json(content)
    except ValueError:  # an object per line, or broken: its reader says what
        return None


def _parsed_yaml(path: Path) -> Any:
    try:
        return plain(parse_yaml(path.read_text(encoding="utf-8"), str(path)).root)
    except UnicodeDecodeError as error:
        raise DataError(f"cannot be read as YAML: {error}", where=str(path)) from error


def _entries(content: Any) -> dict[str, Mapping[str, Any]] | None:
    """Name → entry; None where the content is no list of data sets."""
    if isinstance(content, Mapping) and isinstance(content.get("datasets"), list):
        content = content["datasets"]
    if isinstance(content, list):
        content = {_name_of(entry, number): entry for number, entry in enumerate(content)}
    if not isinstance(content, Mapping) or not content:
        return None
    are_sets = all(isinstance(entry, Mapping) and _given(entry, _FILES) for entry in content.values())
    return {str(name): entry for name, entry in content.items()} if are_sets else None


def _name_of(entry: Any, number: int) -> str:
    name = entry.get("name") if isinstance(entry, Mapping) else None
    return str(name or number)


def _given(entry: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if isinstance(entry.get(name), str) and entry[name]), None)


def _listed(name: str, entry: Mapping[str, Any], listed_in: Path) -> ListedSet:
    where = f"{listed_in}: {name}"
    for key, value in entry.items():
        if key not in _KEYS:
            raise ConfigError(
                f"{value!r} is not obeyed",
                where=where,
                key=str(key),
                way_out=f"Take it out, and set {_OF_THE_RUN.get(key, 'what it is for')} in the YAML of the run.",
            )
    if entry.get("data_augment"):
        raise ConfigError("pictures are not augmented", where=where, key="data_augment", way_out="Set it to false.")
    file, root = entry[_given(entry, _FILES) or ""], _given(entry, _ROOTS)
    path = _located(Path(file), listed_in, where)
    media = None if root is None else _located(Path(entry[root]), listed_in, where)
    return ListedSet(name, path, media, _most_of(entry, where))


def _located(path: Path, listed_in: Path, where: str) -> Path:
    for each in (path, listed_in.parent / path):
        if each.exists():
            return each
    raise DataError(
        f"'{path}' does not exist",
        where=where,
        way_out=f"Paths start at the working directory, or at the folder of {listed_in.name}.",
    )


def _most_of(entry: Mapping[str, Any], where: str) -> int | None:
    """Rows that are taken; None: all."""
    share = entry.get("repeat_time", entry.get("sampling_rate", 1))
    strategy = str(entry.get("sampling_strategy") or "all")
    first = _FIRST.fullmatch(strategy)
    if strategy != "all" and first is None:
        raise ConfigError(
            f"'{strategy}' is not obeyed: rows are taken from the first on",
            where=where,
            key="sampling_strategy",
            way_out="Write all or first:NUMBER; mix.weights of the run's YAML sets shares.",
        )
    if share != 1:
        length = entry.get("length")
        if not (isinstance(share, int | float) and 0 < share < 1 and isinstance(length, int)):
            raise ConfigError(
                f"{share!r} is not obeyed",
                where=where,
                key="repeat_time",
                way_out="Set it to 1, and the shares of data sets in basic_parameters.mix.weights.",
            )
        return max(1, int(length * share))
    return int(first[1]) if first else None
