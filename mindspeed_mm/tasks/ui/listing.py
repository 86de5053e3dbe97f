"""The runs and configurations below a folder, as a list that is asked for every few seconds: what has not changed since
is not opened again."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from mindspeed_mm.core.artifacts import RunFolder
from mindspeed_mm.core.folder_kinds import MARKER, RECORD_KEYS, RUN_KIND
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.core.terminal import visible
from mindspeed_mm.tasks.ui.files import YAML_SUFFIXES, Stamp, read_head, read_tail, shown_name, stamp_of

MOST_ENTRIES = 50_000
"""Files and folders that one look goes through, the nearest first."""
DEEPEST = 6
"""Levels of folders below the board's own."""
_SIGNS = ("run.json", "metrics.jsonl", MARKER)
"""A folder without any of these is no run, and is looked into."""
_HEAD_BYTES, _TAIL_BYTES = 1 << 20, 1 << 14
_NUMBERS = ("loss", "val_loss", "lr")

Record = dict[str, Any]


@dataclass(frozen=True)
class Brief:
    """One line of the list."""

    id: str
    """Stands for the run in requests: clients name no paths."""
    name: str
    """The path below the folder, control characters as escapes."""
    path: Path
    state: str
    """`running`, `finished`, `stopped`, `failed`; `starting` before the first record; `killed` where the record says
    that it runs and no job does; `unreadable`."""
    step: int | None
    total: int | None
    numbers: dict[str, float]
    """The last logged of loss, validation loss and learning rate."""
    started: float | None
    changed: float
    """When its metrics or its record were last written, in seconds since 1970."""

    def to_dict(self) -> Record:
        """For JSON, without the path."""
        return {
            "id": self.id, "name": self.name, "state": self.state, "step": self.step, "total": self.total,
            **{name: self.numbers.get(name) for name in _NUMBERS}, "started": self.started, "changed": self.changed,
        }  # fmt: skip


@dataclass
class Listing:
    """What one look has found."""

    runs: list[Brief] = field(default_factory=list)
    configs: list[str] = field(default_factory=list)
    """YAML files outside of runs, by their paths below the folder."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Known:
    """What the files of a folder said, and the stamps that they had then."""

    stamps: tuple[Stamp | None, ...]
    is_run: bool
    record: Record | None
    last: Record


class Board:
    """Everything below one folder.

    Args:
        root: The folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._known: dict[str, _Known] = {}
        self._paths: dict[str, Path] = {}
        self._lock = threading.Lock()

    def look(self) -> Listing:
        """Find runs, those that are running and the newest first, and configurations."""
        found = Listing()
        with self._lock:
            known, self._known = self._known, {}
            self._walk(found, known)
            self._paths = {run.id: run.path for run in found.runs}
        found.runs.sort(key=lambda run: (run.state != "running", -run.changed, run.name))
        found.configs.sort()
        return found

    def path_of(self, run: str) -> Path | None:
        """The folder of a run that the last look has found; None for any other id."""
        return self._paths.get(run)

    def _walk(self, found: Listing, known: dict[str, _Known]) -> None:
        """Go through folders, the nearest first. Runs are not looked into, and links are not followed."""
        pending, looked = deque([(self.root, 0)]), 0
        while pending:
            folder, depth = pending.popleft()
            names = _entries(folder, MOST_ENTRIES - looked)
            looked += len(names)
            brief = self._brief(folder, names, known) if any(sign in names for sign in _SIGNS) else None
            if brief is not None:
                found.runs.append(brief)
            else:
                folders = self._sort_out(names, found)
                pending.extend((Path(each), depth + 1) for each in folders if depth < DEEPEST)
            if looked >= MOST_ENTRIES:
                found.notes.append(
                    f"Only the first {MOST_ENTRIES:,} files were looked at: start the board in a folder nearer to runs."
                )
                return

    def _sort_out(self, names: dict[str, os.DirEntry[str]], found: Listing) -> list[str]:
        """Add the configurations of a folder that is no run, and return the folders in it."""
        folders = []
        for name, entry in names.items():
            if name.startswith("."):
                continue
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif name.lower().endswith(YAML_SUFFIXES) and entry.is_file(follow_symlinks=False):
                    relative = os.path.relpath(entry.path, self.root)
                    if relative.isprintable():
                        found.configs.append(relative)
        return folders

    def _brief(self, folder: Path, names: dict[str, os.DirEntry[str]], known: dict[str, _Known]) -> Brief | None:
        stamps = tuple(_stamp(names.get(sign)) for sign in _SIGNS)
        content = known.get(str(folder))
        if content is None or content.stamps != stamps:
            content = _read(folder, stamps)
        self._known[str(folder)] = content
        if not content.is_run:
            return None
        record, last = content.record or {}, content.last
        relative = os.path.relpath(folder, self.root)
        changed = max((stamp[0] for stamp in stamps if stamp), default=0) / 1e9
        return Brief(
            id=hashlib.sha256(os.fsencode(relative)).hexdigest()[:20],
            name=shown_name(folder, self.root),
            path=folder,
            state=_state(folder, names, content),
            step=last["step"] if isinstance(last.get("step"), int) else None,
            total=record["total_steps"] if isinstance(record.get("total_steps"), int) else None,
            numbers={name: last[name] for name in _NUMBERS if isinstance(last.get(name), int | float)},
            started=record["started"] if isinstance(record.get("started"), int | float) else None,
            changed=changed,
        )


def _entries(folder: Path, most: int) -> dict[str, os.DirEntry[str]]:
    """What lies in a folder by name; nothing where it is gone or may not be read."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry for entry in islice(entries, most)}
    except OSError:
        return {}


def _stamp(entry: os.DirEntry[str] | None) -> Stamp | None:
    if entry is None:
        return None
    try:
        return stamp_of(entry.stat(follow_symlinks=False))
    except OSError:  # it is gone already
        return None


def _read(folder: Path, stamps: tuple[Stamp | None, ...]) -> _Known:
    record = _object(folder / "run.json") if stamps[0] else {}
    last = _last_numbers(folder / "metrics.jsonl") if stamps[1] else {}
    is_run = bool(last) or (record is not None and record.keys() >= RECORD_KEYS)
    if not is_run and stamps[2]:
        marker = _object(folder / MARKER)
        is_run = marker is not None and marker.get("kind") == RUN_KIND
    return _Known(stamps, is_run, record, last)


def _object(path: Path) -> Record | None:
    """The object in a small JSON file; None where it cannot be read or holds anything else."""
    try:
        content = parse_json(read_head(path, _HEAD_BYTES))
    except (OSError, ValueError):
        return None
    if isinstance(content, dict):
        return content
    return None


def _last_numbers(path: Path) -> Record:
    """The last step and the last of each number in the end of the metrics; a line that is cut short is left out."""
    found: Record = {}
    try:
        lines = read_tail(path, _TAIL_BYTES).decode("utf-8", "replace").split("\n")
    except OSError:
        return found
    for line in reversed(lines):
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            for name in ("step", *_NUMBERS):
                if record.get(name) is not None:
                    found.setdefault(name, record[name])
            if found.keys() >= {"step", *_NUMBERS}:
                break
    return found


def _state(folder: Path, names: dict[str, os.DirEntry[str]], content: _Known) -> str:
    if content.record is None:
        return "unreadable"
    status = str(content.record.get("status", ""))
    lock = RunFolder(folder).lock_file.name
    if status in ("", "running"):
        if lock in names and names[lock].is_file(follow_symlinks=False) and RunFolder(folder).is_held():
            if status:
                return "running"
            return "starting"
        if status:
            return "killed"
        return "unknown"
    return visible(status)[:20]
