"""What a folder is to us, told by its files: a checkpoint, a run, a model, or something that one of our writers made.

Writers ask here before they touch anything, so nothing is opened but small files of our own.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindspeed_mm.core.json_file import JsonObject, parse_json

MARKER = ".mindspeed-mm-folder"
"""File that tells a folder which one of our writers made; without a suffix, so that no library takes it for its own."""
MARKER_FORMAT = "mindspeed-mm-folder"
EXPORT_PLACES = ("hf", "exported")
"""Folders of a run in which model folders lie."""
RUN_KIND = "run"
RECORD_KEYS = frozenset({"status", "exit_code", "packages"})
"""What the `run.json` of a run has."""
_NS_OF_A_SECOND = 1_000_000_000
_MODEL_FILES = ("model_index.json", "adapter_config.json")


def read_marker(folder: Path) -> JsonObject | None:
    """The content of a folder's marker; None when it has none that is ours."""
    content = _read_json(folder / MARKER)
    is_ours = isinstance(content, dict) and content.get("format") == MARKER_FORMAT
    if is_ours:
        return content
    return None


def entries_of(folder: Path) -> Iterator[str]:
    """Every file, folder and link below a folder by its relative name, the marker left out; links are not followed."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name != MARKER:
            yield name


def stamps_of(folder: Path) -> dict[str, list[int] | None]:
    """Of every entry below a folder what tells later that it is as it was, without reading it: a file's size in bytes
    and the time of its last change in ns; None of a folder, whose own entries tell."""
    found: dict[str, list[int] | None] = {}
    for name in entries_of(folder):
        with suppress(FileNotFoundError):  # somebody has taken it away meanwhile
            status = (folder / name).lstat()
            found[name] = None if stat.S_ISDIR(status.st_mode) else [status.st_size, status.st_mtime_ns]
    return found


def foreign_entries(folder: Path) -> list[str]:
    """What lies in a folder that its marker does not list; everything, when there is no complete list."""
    listed = _listed(folder)
    return [name for name in entries_of(folder) if name not in listed]


def changed_entries(folder: Path) -> list[str]:
    """What a folder's marker lists, and somebody has written to or replaced since, by size and time. A copy whose files
    have other times than those it was made from counts as changed: telling would mean reading all of it.

    The first markers list names alone: there, whatever is younger than the marker, which is written last, was changed.
    """
    listed, stamps = _listed(folder), stamps_of(folder)
    own = {name: stamp for name, stamp in stamps.items() if name in listed}
    if isinstance(listed, dict):
        return [name for name, stamp in own.items() if not _is_as_it_was(stamp, listed[name])]
    written_ns = (folder / MARKER).lstat().st_mtime_ns if listed else 0
    return [name for name, stamp in own.items() if stamp and stamp[1] > written_ns]


def is_touched(folder: Path) -> bool:
    """Whether a folder holds anything but what a writer of ours left there, as it left it."""
    return bool(foreign_entries(folder) or changed_entries(folder))


def _listed(folder: Path) -> JsonObject | list[Any]:
    entries = (read_marker(folder) or {}).get("entries")
    if isinstance(entries, dict | list):
        return entries
    return []


def _is_as_it_was(found: list[int] | None, listed: object) -> bool:
    """Whether two stamps are of the same content. Some file systems and archives keep whole seconds only."""
    match found, listed:
        case [size, time_ns], [int(then_size), int(then_ns)]:
            return size == then_size and time_ns in (then_ns, then_ns - then_ns % _NS_OF_A_SECOND)
    return found is None and listed is None


def is_run(folder: Path) -> bool:
    """Whether a folder is a run of ours: by its marker, its record, or a checkpoint of ours. Somebody's own `run.json`
    makes none, and neither does a tracker file: other trainers write it too, beside checkpoints of their own."""
    if (read_marker(folder) or {}).get("kind") == RUN_KIND:
        return True
    record = _read_json(folder / "run.json")
    if isinstance(record, dict) and record.keys() >= RECORD_KEYS:
        return True
    return any(has_own_manifest(folder / name) for name in _names_in(folder) if name.startswith("iter_"))


def _names_in(folder: Path) -> list[str]:
    """What lies in a folder; nothing where it is none or cannot be read."""
    with suppress(OSError, ValueError):  # a NUL in its name
        return os.listdir(folder)  # noqa: PTH208 (folders above may hold thousands)
    return []


def has_own_manifest(folder: Path) -> bool:
    """Whether a folder is a checkpoint that a run of ours committed; its files are not looked at."""
    manifest = _read_json(folder / "MANIFEST.json")
    return isinstance(manifest, dict) and manifest.get("format") == "mindspeed-mm-checkpoint"


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a committed checkpoint, ours or torch's."""
    return has_own_manifest(folder) or ((folder / ".metadata").is_file() and any(folder.glob("*.distcp")))


def is_model(folder: Path) -> bool:
    """Whether a folder holds a model or adapters."""
    if any((folder / name).is_file() for name in _MODEL_FILES):
        return True
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def kind_of(folder: Path) -> str | None:
    """`a checkpoint`, `a model folder`, `a run folder`, or None."""
    if is_checkpoint(folder):
        return "a checkpoint"
    if is_model(folder):
        return "a model folder"
    if is_run(folder):
        return "a run folder"
    return None


def is_feature_set(folder: Path) -> bool:
    """Whether a folder holds features that `mm extract` writes or has written, in whatever state; somebody's own
    `features.json` makes none."""
    description = folder / "features.json"
    if not description.is_file():
        return False
    return not description.stat().st_size or b'"mindspeed-mm-features"' in description.read_bytes()


def is_output(folder: Path) -> bool:
    """Whether a folder holds what a command of ours has written, and so no data: a run, a checkpoint, a model,
    features."""
    return is_feature_set(folder) or kind_of(folder) is not None


def kind_above(path: Path) -> tuple[str, Path] | None:
    """The checkpoint, model folder or run that a path lies inside of, if any, and where that is. A run's folders of
    exported models are not part of the run in this sense."""
    below = path
    for folder in path.parents:
        kind = kind_of(folder)
        if kind == "a run folder" and below.name in EXPORT_PLACES and below != path:
            return None
        if kind is not None:
            return kind, folder
        below = folder
    return None


def _read_json(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None
