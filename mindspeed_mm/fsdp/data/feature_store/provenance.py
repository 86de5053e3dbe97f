"""Which encoders made a feature set: the SHA-256 of every file that decides what an encoder gives.

Beside each hash stand the file's size and time, so that training need not read gigabytes again while nothing changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_mm.core.errors import DataError, Problem
from mindspeed_mm.core.kept_hashes import kept_sha256
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
    known = known or {}
    places: list[tuple[str, str]] = []
    """Component and file, of each file that is measured."""
    paths: list[Path] = []
    for name, files in sorted(encoder_files(adapter, absent).items()):
        for path in sorted(files):
            places.append((name, path.relative_to(adapter.folder).as_posix()))
            paths.append(path)
    before = [known.get(name, {}).get(file) for name, file in places]
    measured: dict[str, dict[str, FileMark]] = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        for (name, file), mark in zip(places, pool.map(_measure, paths, before), strict=True):
            measured.setdefault(name, {})[file] = mark
    return measured


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
    unknown = sorted(absent & store.components.keys())
    if unknown:
        warnings.warn(
            f"{adapter.folder} lacks {', '.join(unknown)}: it is not known whether the features in {store.folder} were "
            "made by the same",
            stacklevel=2,
        )
    known = {name: files for name, files in store.components.items() if name not in absent}
    problems = component_problems(known, measure_components(adapter, known, absent), adapter.folder)
    if not problems:
        return
    headline = (
        f"{store.folder}: these features were made by other weights than those of {adapter.folder}. "
        "Run mm extract with --overwrite to make them again."
    )
    if store.model_folder != str(adapter.folder):
        headline += f" Or point model.model_name_or_path to {store.model_folder}."
    raise DataError(headline, problems=problems)


def component_problems(before: Components, now: Components, folder: Path) -> list[Problem]:
    """One finding for each component of which a file is another, is missing or is new."""
    problems = []
    for name in sorted(before.keys() | now.keys()):
        was, new = before.get(name, {}), now.get(name, {})
        changed = [file for file in sorted(was.keys() | new.keys()) if _sha(was, file) != _sha(new, file)]
        if not changed:
            continue
        what = _describe(was, new, changed[0])
        if len(changed) > 1:
            what += f" (and {len(changed) - 1} more files)"
        problems.append(Problem(what, where=str(folder / changed[0]), key=name))
    return problems


def from_json(content: Mapping[str, Any]) -> Components:
    """Rebuild the components, with their files' marks, from the content of `features.json`."""
    components: dict[str, dict[str, FileMark]] = {}
    for name, files in content.items():
        components[name] = {file: FileMark(**mark) for file, mark in files.items()}
    return components


def _measure(path: Path, known: FileMark | None) -> FileMark:
    if known is not None and known.is_untouched(path):
        return known
    status = path.stat()
    return FileMark(kept_sha256(path), status.st_size, status.st_mtime_ns)


def _sha(files: Mapping[str, FileMark], file: str) -> str | None:
    return files[file].sha256 if file in files else None


def _describe(was: Mapping[str, FileMark], new: Mapping[str, FileMark], file: str) -> str:
    if file not in new:
        return "is missing, the features were made with it"
    if file not in was:
        return "is new, the features were made without it"
    return f"SHA-256 is {new[file].sha256[:12]}…, the features were made with {was[file].sha256[:12]}…"
