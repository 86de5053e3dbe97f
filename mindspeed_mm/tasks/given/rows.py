"""Rows that are in memory, written as a file that training, inference and evaluation read like any other."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import numpy as np

from mindspeed_mm.core.artifacts import atomic_write_bytes, sha256_file
from mindspeed_mm.core.errors import UsageError

if TYPE_CHECKING:
    from datasets import Dataset
    from PIL.Image import Image

Row = Mapping[str, Any]
MEDIA = "media"
_SUFFIXES = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"RIFF": ".wav", b"fLaC": ".flac", b"OggS": ".ogg"}
"""First bytes of a file → its ending."""


def named_path(name: object, key: str) -> Path:
    """The path of a name that was given for `key`.

    Raises:
        UsageError: It is not a name, or no file can have it.
    """
    if not isinstance(name, str | os.PathLike):
        raise UsageError(f"{type(name).__name__} is not a path", key=key, way_out="Give the name of a file or folder.")
    if "\0" in str(name):
        raise UsageError(f"{str(name)!r:.200} holds a NUL character", key=key, way_out="No file can have this name.")
    try:
        return Path(os.fspath(name))  # Path itself hides, from Python 3.12 on, what `__fspath__` raises
    except TypeError as error:  # a run without a folder says so
        raise UsageError(str(error), key=key, way_out="Give the name of a file or folder.") from error


def optional_path(name: object, key: str) -> Path | None:
    """`named_path` of an argument that may be left out."""
    if name is not None:
        return named_path(name, key)
    return None


def is_in_memory(rows: object) -> bool:
    """Whether rows are objects, and not a file."""
    return not (rows is None or isinstance(rows, str | os.PathLike))


class _Table(Protocol):
    """A DataFrame of pandas, as far as rows are made of it."""

    columns: object

    def to_dict(self, orient: str) -> list[Row]: ...


def listed_rows(rows: object, name: str) -> Dataset | list[Row]:
    """Rows that are rows: a `datasets.Dataset` as it is, everything else as a list of mappings.

    Args:
        rows: As somebody gave them.
        name: What they are for.

    Raises:
        UsageError: They are something else, there are none, or one of them is not a mapping.
    """
    listed = rows if _is_datasets(rows) else _mappings(rows, name)
    if not len(listed):
        raise UsageError("there are no rows", key=f"{name} rows", way_out="Give at least one.")
    return listed


def _mappings(rows: object, name: str) -> list[Row]:
    if _is_table(rows):
        rows = rows.to_dict("records")
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise UsageError(
            f"{type(rows).__name__} is not a list of rows",
            key=f"{name} rows",
            way_out="Give a list of dicts, a datasets.Dataset or a DataFrame; or the path of a file.",
        )
    listed = list(rows)
    for index, row in enumerate(listed):
        if not isinstance(row, Mapping):
            where = f"{name} rows, row {index}"
            raise UsageError(f"{type(row).__name__} is not a row", where=where, way_out="A row is a dict.")
    return listed


def with_ids(rows: Dataset | list[Row]) -> Dataset | list[Row]:
    """Rows of `listed_rows` that each have an `id`: its own, else its number."""
    if _is_datasets(rows):
        if "id" in rows.column_names:
            return rows
        return rows.add_column("id", list(map(str, range(len(rows)))))
    numbered: list[Row] = []
    for index, row in enumerate(rows):
        numbered.append({**row, "id": str(index)} if _is_missing(row.get("id")) else row)
    return numbered


def write_rows(rows: Dataset | list[Row], folder: Path, name: str, *, stores_media: bool = True) -> Path:
    """The file `<folder>/<name>-<hash of the content>`, so that the same rows are the same file; written when it is not
    there yet.

    Args:
        rows: Of `listed_rows`. A `datasets.Dataset` is stored as parquet, its media inside. In mappings pictures may be
            PIL images and media may be bytes or `{"bytes": …}`, stored beside, in `media/`.
        folder: Made when needed.
        name: What the rows are for.
        stores_media: Media become files of their own; False for a folder that goes away, to which no record may lead.

    Raises:
        UsageError: A row holds something that no file of rows can.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if _is_datasets(rows):
        return _write_parquet(rows, folder, name)
    store = _MediaStore(folder / MEDIA if stores_media else None)
    lines = [_line(row, f"{name} rows, row {index}", store) for index, row in enumerate(rows)]
    content = b"".join(lines)
    path = folder / f"{name}-{hashlib.sha256(content).hexdigest()[:12]}.jsonl"
    if not path.exists():
        atomic_write_bytes(path, content)
    return path


def _is_datasets(rows: object) -> TypeGuard[Dataset]:
    """Whether rows are a `datasets.Dataset`; the library need not be imported to know it."""
    return type(rows).__module__.partition(".")[0] == "datasets" and hasattr(rows, "to_parquet")


def _is_table(rows: object) -> TypeGuard[_Table]:
    """Whether rows are a DataFrame of pandas, which is not a dependency."""
    return hasattr(rows, "to_dict") and hasattr(rows, "columns")


def _write_parquet(rows: Dataset, folder: Path, name: str) -> Path:
    draft = folder / f".{name}-{id(rows):x}.parquet"
    try:
        rows.to_parquet(str(draft))
        return draft.replace(folder / f"{name}-{sha256_file(draft)[:12]}.parquet")
    finally:
        draft.unlink(missing_ok=True)


def _line(row: Row, where: str, store: _MediaStore) -> bytes:
    """A row as a line of JSON, without the cells that a table says are missing."""
    try:
        cells = {name: value for name, value in row.items() if not _is_missing(value)}
        return json.dumps(_plain(cells, store), ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, OSError, RecursionError) as error:
        reason = "it contains itself, or is nested too deeply" if isinstance(error, RecursionError) else error
        raise UsageError(
            f"cannot be stored: {reason}",
            where=where,
            way_out="Rows hold texts, numbers, lists, dicts, paths, PIL images and bytes of media.",
        ) from error


def _is_missing(value: object) -> bool:
    """Whether it is what stands in a table where nothing is: None, NaN, pandas' NA and NaT."""
    if type(value).__name__ in ("NoneType", "NAType", "NaTType"):
        return True
    return isinstance(value, float | np.floating) and bool(np.isnan(value))


def _plain(value: object, store: _MediaStore) -> object:
    """What JSON can say; media are stored as files and named instead."""
    if isinstance(value, Mapping):
        content = value.get("bytes")
        if isinstance(content, bytes):
            return store.put(content)
        return {str(name): _plain(item, store) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, store) for item in value]
    if isinstance(value, bytes):
        return store.put(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic | np.ndarray) and value.ndim <= 1:  # more dimensions are pictures and sounds
        return _plain(value.tolist(), store)
    if is_picture(value):
        return store.put(picture_bytes(value))
    return value


def is_picture(value: object) -> TypeGuard[Image]:
    """Whether it is a PIL image; the library need not be imported to know it."""
    return hasattr(value, "tobytes") and hasattr(value, "getexif")


def picture_bytes(image: Image) -> bytes:
    """A PIL image as a PNG of what a model is shown of it: the same pixels as when its file is named."""
    # Imported here: rows without pictures need none of it.
    from mindspeed_mm.fsdp.data.data_utils.decoding.image_media import to_upright_rgb

    content = io.BytesIO()
    to_upright_rgb(image).save(content, format="PNG")
    return content.getvalue()


class _MediaStore:
    """Takes up media of rows in memory.

    Args:
        folder: Each becomes a file there, named by its content; None: rows hold the bytes themselves, and records that
            tell of them no path.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def put(self, content: bytes) -> str | dict[str, str]:
        """What a row says of it."""
        if self._folder is None:
            return {"bytes": base64.b64encode(content).decode()}
        suffix = ".bin"
        for start, known in _SUFFIXES.items():
            if content.startswith(start):
                suffix = known
        path = self._folder / f"{hashlib.sha256(content).hexdigest()[:16]}{suffix}"
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            atomic_write_bytes(path, content)
        return str(path.resolve())
