"""Names and places inside a run folder: `iter_0000123/`, its files, and the tracker."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

from mindspeed_mm.core.artifacts import atomic_write_text, fsync_path
from mindspeed_mm.core.drafts import DRAFT, FORMER, PREFIX, remove_dead_files
from mindspeed_mm.core.exchange import swap_folders
from mindspeed_mm.core.folder_kinds import has_own_manifest

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "MANIFEST.json"
METADATA = ".metadata"
TRAINER_STATE = "trainer_state.json"
RELEASE = "release"
FOREIGN_SUFFIX = ".foreign"
"""And a number: what the name of a folder gets that is none of ours and stands where a checkpoint is committed."""
_FOLDER = re.compile(r"iter_(\d{7,})")
_STEP = re.compile(r"[0-9]{1,18}")
"""A step as a tracker says it; more digits are no step of anybody's."""
_LEFT = re.compile(re.escape(PREFIX) + r"(iter_\d{7,})\.(?:draft|former)")


def checkpoint_folder(save: Path, iteration: int) -> Path:
    """Return the path of an iteration's checkpoint inside a run folder: `<save>/iter_0000123`."""
    return save / f"iter_{iteration:07d}"


def draft_folder(save: Path, iteration: int) -> Path:
    """Where a checkpoint is written before it is committed: `<save>/.mindspeed-mm-iter_0000123.draft`."""
    folder = checkpoint_folder(save, iteration)
    return folder.with_name(f"{PREFIX}{folder.name}{DRAFT}")


def rng_file(rank: int) -> str:
    """Name of a rank's random-number state."""
    return f"rng_rank{rank}.safetensors"


def list_iterations(save: Path) -> list[int]:
    """Steps that have a folder, ascending; whether one is valid is not looked at."""
    if not save.is_dir():
        return []
    steps = []
    for path in save.iterdir():
        match = _FOLDER.fullmatch(path.name)
        if match and path.is_dir():
            steps.append(int(match[1]))
    return sorted(steps)


def read_tracker(save: Path) -> str | None:
    """What the tracker says: a number, `release`, or None when it is missing or unreadable."""
    try:
        text = (save / TRACKER).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    if text == RELEASE or _STEP.fullmatch(text):
        return text
    return None


def tracker_text(save: Path) -> str:
    """What the tracker holds, whether or not it is a step; nothing where there is none."""
    tracker = save / TRACKER
    if not tracker.is_file():
        return ""
    return tracker.read_text(errors="replace").strip()


def write_tracker(save: Path, iteration: int) -> None:
    """Name the newest committed step, atomically."""
    atomic_write_text(save / TRACKER, f"{iteration}\n")


def remove_checkpoint(folder: Path) -> None:
    """Delete a committed checkpoint: it loses its name first, so that no half of it ever looks committed."""
    doomed = folder.with_name(f"{PREFIX}{folder.name}{DRAFT}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    fsync_path(folder.parent)
    shutil.rmtree(doomed)


def commit(draft: Path, folder: Path, note: Callable[[str], None]) -> None:
    """Give a complete draft its name. A folder of that name that stands there already goes away only after that; one
    without a manifest of ours, which somebody else may have put there, is kept under another name.

    Args:
        draft: The complete checkpoint.
        folder: Its name.
        note: Tells the user of a folder that was kept.
    """
    if os.path.lexists(folder) and not has_own_manifest(folder):
        note(put_aside(folder, "without a manifest of ours"))
    if not folder.exists():
        draft.rename(folder)
        fsync_path(folder.parent)
        return
    former = draft.with_suffix(FORMER)
    swap_folders(draft, folder, former)
    fsync_path(folder.parent)
    shutil.rmtree(former, ignore_errors=True)


def put_aside(folder: Path, why: str) -> str:
    """Give what somebody else left in the way of a folder of ours another name.

    Args:
        folder: The name that is needed.
        why: What shows that it is not ours.

    Returns:
        A line for the user.
    """
    for number in count(1):
        aside = folder.with_name(f"{folder.name}{FOREIGN_SUFFIX}{number}")
        if not os.path.lexists(aside):
            break
    folder.rename(aside)
    return f"warning: {folder} was there already, {why}: it is kept as {aside.name}"


def remove_leftovers(save: Path) -> list[str]:
    """Clear what a killed job left: drafts, half-deleted folders, an interrupted exchange. Returns their names."""
    if not save.is_dir():
        return []
    cleared = []
    for path in sorted(save.iterdir(), key=lambda path: path.suffix != FORMER):  # these may be needed: first
        if found := _LEFT.fullmatch(path.name):
            _clear(path, save / found[1])
            cleared.append(path.name)
    return cleared + remove_dead_files(save)


def _clear(left: Path, folder: Path) -> None:
    """Delete what was left, or give a folder that was put aside its name back when nothing has it."""
    if left.suffix == FORMER and not folder.exists():
        left.rename(folder)
    else:
        shutil.rmtree(left)
