"""Folders whose media belong to those of a data set by their names: masks, control videos, pictures before an edit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation
from mindspeed_mm.fsdp.data.datasets.generation.media_folders import MEDIA_SUFFIXES

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

    def facts(self) -> dict[str, Any]:
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
