"""Which encoders made a feature set: the SHA-256 of every file that decides what an encoder gives.

Beside each hash stand the file's size and time, so that training need not read gigabytes again while nothing changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_mm.core.artifacts import sha256_file
from mindspeed_mm.core.errors import DataError, Problem
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.components import absent_encoders, encoder_files

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.data.feature_store.reader import FeatureStore

_THREADS = 4
"""Hashing releases the interpreter's lock; disks are mostly faster than one core hashes."""


@dataclass(frozen=True)
class FileMark:
    """A file as it was when features were made of it."""

    sha256: str
    size: int
    """Bytes."""
    mtime_ns: int

    def is_untouched(self, path: Path) -> bool:
        """Whether size and time are still the same."""
        try:
            status = path.stat()
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == (self.size, self.mtime_ns)


Components = Mapping[str, Mapping[str, FileMark]]
"""Component (`vae`, `text_encoder` …) → file, relative to the model folder → what it was."""


def measure_components(
    adapter: DiffusionAdapter, known: Components | None = None, absent: Collection[str] = ()
) -> Components:
    """Hash the files of the adapter's encoders.

    Args:
        adapter: The family, with its folder.
        known: Hashes from before; files that nobody has touched since are not read again.
        absent: Encoders to pass over.
    """
    files_of = sorted(encoder_files(adapter, absent).items())
    found = {name: _relative(files, adapter.folder) for name, files in files_of}
    known = known or {}
    with ThreadPoolExecutor(_THREADS) as pool:
        marks = {
            (name, file): pool.submit(_measure, path, known.get(name, {}).get(file))
            for name, files in found.items()
            for file, path in files.items()
        }
        return {name: {file: marks[name, file].result() for file in files} for name, files in found.items()}


def check_provenance(store: FeatureStore, adapter: DiffusionAdapter) -> None:
    """Refuse features that other encoders made than those of the configured folder.

    Args:
        store: The features.
        adapter: The configured family and folder.

    Raises:
        DataError: Naming every component that differs, where, and the way out.
    """
    if store.components is None:
        warnings.warn(
            f"{store.folder}: features of the older layout do not say which weights made them: it is not known whether "
            "they fit this model",
            stacklevel=2,
        )
        return
    absent = absent_encoders(adapter)
    if absent & store.components.keys():
        warnings.warn(
            f"{adapter.folder} lacks {', '.join(sorted(absent & store.components.keys()))}: it is not known whether "
            f"the features in {store.folder} were made by the same",
            stacklevel=2,
        )
    known = {name: files for name, files in store.components.items() if name not in absent}
    problems = component_problems(known, measure_components(adapter, known, absent), adapter.folder)
    if not problems:
        return
    made_with = store.model_folder
    elsewhere = f" Or point model.model_name_or_path to {made_with}." if made_with != str(adapter.folder) else ""
    raise DataError(
        f"{store.folder}: these features were made by other weights than those of {adapter.folder}. "
        f"Run mm extract with --overwrite to make them again.{elsewhere}",
        problems=problems,
    )


def component_problems(before: Components, now: Components, folder: Path) -> list[Problem]:
    """One finding for each component of which a file is another, is missing or is new."""
    problems = []
    for name in sorted(before.keys() | now.keys()):
        was, new = before.get(name, {}), now.get(name, {})
        changed = [file for file in sorted(was.keys() | new.keys()) if _sha(was, file) != _sha(new, file)]
        if changed:
            more = f" (and {len(changed) - 1} more files)" if len(changed) > 1 else ""
            problems.append(Problem(_describe(was, new, changed[0]) + more, where=str(folder / changed[0]), key=name))
    return problems


def from_json(content: Mapping[str, Any]) -> Components:
    """Out of `features.json`."""
    return {name: {file: FileMark(**mark) for file, mark in files.items()} for name, files in content.items()}


def _relative(files: Sequence[Path], folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in sorted(files)}


def _measure(path: Path, known: FileMark | None) -> FileMark:
    if known is not None and known.is_untouched(path):
        return known
    status = path.stat()
    return FileMark(sha256_file(path), status.st_size, status.st_mtime_ns)


def _sha(files: Mapping[str, FileMark], file: str) -> str | None:
    return files[file].sha256 if file in files else None


def _describe(was: Mapping[str, FileMark], new: Mapping[str, FileMark], file: str) -> str:
    if file not in new:
        return "is missing, the features were made with it"
    if file not in was:
        return "is new, the features were made without it"
    return f"SHA-256 is {new[file].sha256[:12]}…, the features were made with {was[file].sha256[:12]}…"
