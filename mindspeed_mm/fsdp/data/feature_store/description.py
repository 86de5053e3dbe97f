"""`features.json`: what made a feature set. Work goes on only with the same, training only with what fits its model.

Which encoders made it is told by the SHA-256 of every file that decides what an encoder gives. Beside each hash stand
the file's size and time, so that training need not read gigabytes again while nothing changed.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_mm.core.artifacts import atomic_write_text
from mindspeed_mm.core.errors import DataError, Problem
from mindspeed_mm.core.json_file import JsonMapping, JsonObject, parse_json
from mindspeed_mm.core.kept_hashes import kept_sha256
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.components import absent_encoders, encoder_files

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.data.feature_store.reader import FeatureStore


FORMAT = "mindspeed-mm-features"
FORMAT_VERSION = 2
"""Before 2, the checksums of tensors were SHA-256."""


@dataclass(frozen=True)
class FeatureSetContents:
    """What a finished set holds."""

    samples: int
    skipped: int
    shards: Mapping[str, int]
    """File → bytes."""
    cut_captions: int = 0
    """Rows with a caption of which the text encoder did not read the end."""
    empty_captions: int = 0
    """Rows with an empty caption."""


@dataclass(frozen=True)
class Description:
    """Content of `features.json`: what a feature set was made of, by which encoders and settings."""

    family: str
    """Class of the transformer that the features are for."""
    task: str
    geometry: JsonMapping
    """Geometry of the VAE and the transformer, see `MediaGeometry`."""
    model_folder: str
    """Where the encoders were."""
    components: Components
    preprocessing: JsonMapping
    """What decides which pixels are made of a medium."""
    dtype: str | None
    """That encoders were run in; None: each as its folder stores it. With how they were quantised, where they were."""
    batch_size: int | None
    """Samples encoded at a time; None: by their pixels."""
    rows: int
    rows_fingerprint: str
    """Fingerprint of media, captions, further columns and sizes, in their order."""
    versions: Mapping[str, str] = field(default_factory=dict)
    component_configs: Mapping[str, JsonObject] = field(default_factory=dict)
    """What sizes follow from, for folders that lack the component: `vae` → its config.json."""
    contents: FeatureSetContents | None = None
    """None while it is not finished."""
    first_batch: int = 0
    """Number of the first batch of the latest work; those before it are of rows as they were earlier."""
    plan: str = ""
    """Hash of what the latest work encodes; empty: every row."""
    format: str = FORMAT
    format_version: int = FORMAT_VERSION

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        atomic_write_text(path, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")


def read_description(path: Path) -> Description:
    """Read and check `features.json`.

    Raises:
        DataError: It is missing, broken, of another kind, or of a newer version.
    """
    try:
        content = parse_json(path.read_bytes())
        if content.get("format") != FORMAT:
            raise ValueError(f"its format is {content.get('format')!r}")
        _check_version(content, path)
        contents = content.get("contents")
        return Description(
            **content
            | {
                "components": from_json(content["components"]),
                "contents": None if contents is None else FeatureSetContents(**contents),
            }
        )
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"describes no features ({error})", where=str(path), way_out="Run mm extract with --overwrite."
        ) from error


def check_same_work(before: Description, now: Description, path: Path) -> None:
    """Raise `DataError` that names what differs, when features were begun by other encoders or in another way. Other
    rows and other sizes are work that is added."""
    problems = [Problem(what, key=key, where=str(path)) for key, what in _differences(before, now)]
    problems += component_problems(before.components, now.components, Path(now.model_folder))
    if problems:
        raise DataError(
            "features were begun with something else; undo the change, or make them all again with --overwrite",
            problems=problems,
        )


def check_fits(description: Description, adapter: DiffusionAdapter, path: Path) -> None:
    """Raise `DataError` when features are for another family, another task or latents of another kind."""
    mine = {"family": adapter.transformer_class, "task": adapter.task, **_numbers(asdict(adapter.geometry))}
    theirs = {"family": description.family, "task": description.task, **_numbers(description.geometry)}
    for name in mine:
        if mine[name] != theirs.get(name):
            raise DataError(
                f"features are for {name} {theirs.get(name)}, the model has {mine[name]}",
                where=str(path),
                key="data.dataset_param.basic_parameters.features_dir",
                way_out=f"They were made with {description.model_folder}: train that model, or run mm extract into "
                "another folder.",
            )


def _check_version(content: Mapping[str, object], path: Path) -> None:
    version = content.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise DataError(
            f"has format version {version}, this installation reads up to {FORMAT_VERSION}",
            where=str(path),
            key="format_version",
            way_out="Update mindspeed-mm.",
        )


def _differences(before: Description, now: Description) -> Iterator[tuple[str, str]]:
    for name in ("family", "task", "dtype", "batch_size"):
        was, new = getattr(before, name), getattr(now, name)
        if was != new:
            yield name, f"{_plain(was)} then, {_plain(new)} now"
    was, new = _numbers(before.geometry), _numbers(now.geometry)
    for name in sorted(was.keys() | new.keys()):
        if was.get(name) != new.get(name):
            yield f"geometry.{name}", f"{_plain(was.get(name))} then, {_plain(new.get(name))} now"


def _plain(value: object) -> str:
    if value is None:
        return "not set"
    return str(value)


def _numbers(values: Mapping[str, object]) -> JsonObject:
    """As JSON gives them back: it has lists, no tuples."""
    plain = dict(values)
    for name, value in values.items():
        if isinstance(value, tuple):
            plain[name] = list(value)
    return plain


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
    return measure_files(adapter.folder, encoder_files(adapter, absent), known)


def measure_files(
    folder: Path, files_by_component: Mapping[str, Collection[Path]], known: Components | None = None
) -> Components:
    """Hash the files of components.

    Args:
        folder: Of the model.
        files_by_component: Component → its files inside.
        known: As of `measure_components`.
    """
    known = known or {}
    places: list[tuple[str, str]] = []
    """Component and file, of each file that is measured."""
    paths: list[Path] = []
    for name, files in sorted(files_by_component.items()):
        for path in sorted(files):
            places.append((name, path.relative_to(folder).as_posix()))
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
    check_components(store, known, measure_components(adapter, known, absent), adapter.folder)


def check_components(store: FeatureStore, known: Components, now: Components, folder: Path) -> None:
    """Raise `DataError` where the files of a model's folder are others than those that made the features.

    Args:
        store: The features.
        known: Their components, as far as they are compared.
        now: Those of the folder.
        folder: Of the model.
    """
    problems = component_problems(known, now, folder)
    if not problems:
        return
    headline = (
        f"{store.folder}: these features were made by other weights than those of {folder}. "
        "Run mm extract with --overwrite to make them again."
    )
    if store.model_folder != str(folder):
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


def from_json(content: JsonMapping) -> Components:
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
    if file in files:
        return files[file].sha256
    return None


def _describe(was: Mapping[str, FileMark], new: Mapping[str, FileMark], file: str) -> str:
    if file not in new:
        return "is missing, the features were made with it"
    if file not in was:
        return "is new, the features were made without it"
    return f"SHA-256 is {new[file].sha256[:12]}…, the features were made with {was[file].sha256[:12]}…"
