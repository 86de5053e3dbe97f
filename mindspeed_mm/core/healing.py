"""Finishes or takes back what killed writers of folders began.

A writer's marker holds what this needs: `draft`, the name under which the folder was written, and of a folder converted
in place `original`, where the folder that it replaces is kept. A folder is touched only if its own marker, or that of a
folder beside it, names it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mindspeed_mm.core.artifacts import fsync_path, one_at_a_time
from mindspeed_mm.core.drafts import DRAFT, FORMER, claimed, is_draft_file, named, remove_dead_files
from mindspeed_mm.core.folder_kinds import MARKER, is_touched, read_marker
from mindspeed_mm.core.json_file import JsonObject

BACKUP = ".bak"
"""Suffix of the name under which the original of a conversion in place is kept."""
DRAFT_KEY, ORIGINAL_KEY = "draft", "original"


def heal(parent: Path) -> None:
    """Finish or take back what writers that were killed began in this folder: drafts are removed, and a folder that was
    being replaced gets its name back. Folders that live processes use, and users' own, stay as they are."""
    with suppress(PermissionError), one_at_a_time(parent):  # another user's are his to heal
        for former in named(parent, FORMER):
            _heal_former(former)
        for backup in sorted(parent.glob(f"*{BACKUP}")):
            _heal_backup(backup)
        for draft in named(parent, DRAFT):
            _heal_draft(draft)
        remove_dead_files(parent)


def heal_missing(path: Path) -> None:
    """`heal` around a path where nothing is: the folder of that name may have been put aside by a killed writer."""
    with suppress(OSError, ValueError):
        if (
            not os.path.lexists(path)
            and path.parent.is_dir()
            and (named(path.parent, FORMER) or named(path.parent, DRAFT))
        ):
            heal(path.parent)


def remove_marked(folder: Path) -> None:
    """Remove a folder of ours, its marker last: half of it is still known as ours."""
    for path in list(folder.iterdir()):
        if path.name == MARKER:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    (folder / MARKER).unlink(missing_ok=True)
    folder.rmdir()


def note_original(original: Path, kept_as: Path, *, keep: bool) -> dict[str, object]:
    """For the marker of a folder that replaces another: where that one is put, and how it is recognised there."""
    return {"name": kept_as.name, "identity": _identity(original), "keep": keep}


def _identity(folder: Path) -> list[int]:
    """What tells a folder from any other that has had its name, however it is renamed."""
    status = folder.stat()
    return [status.st_ino, status.st_mtime_ns]


def _heal_former(former: Path) -> None:
    """A folder that was put aside gets its name back, unless another has it: then the new one is complete."""
    draft, marker = former.with_suffix(DRAFT), read_marker(former) or {}
    if marker.get(DRAFT_KEY) == draft.name:  # the new one, which the other was about to change places with
        _remove_dead(former)
        return
    target = _sibling(former, (read_marker(draft) or marker).get("name"))
    with claimed(draft) as is_dead:
        if not is_dead:
            return
        if target is not None and not os.path.lexists(target):
            former.rename(target)
            fsync_path(former.parent)
            return
    _remove_replaced(former)


def _heal_backup(backup: Path) -> None:
    """The name of a backup may hold the new folder, which the original was about to change places with."""
    marker = (read_marker(backup) if backup.is_dir() else None) or {}
    original, target = marker.get(ORIGINAL_KEY), _sibling(backup, marker.get("name"))
    if not isinstance(original, dict) or original.get("name") != backup.name or target is None:
        return
    if target.is_dir() and _identity(target) == original.get("identity"):
        _remove_dead(backup)


def _heal_draft(draft: Path) -> None:
    marker = read_marker(draft)
    if marker is None or marker.get(DRAFT_KEY) == draft.name or "entries" not in marker:
        with claimed(draft) as is_dead:
            if is_dead:
                _put_back_original(draft.parent, marker or {})
        _remove_dead(draft)
    else:
        _remove_replaced(draft)


def _put_back_original(parent: Path, marker: Mapping[str, object]) -> None:
    """Of a conversion in place that was killed between two renames."""
    original = marker.get(ORIGINAL_KEY)
    if not isinstance(original, dict):
        return
    target, kept = _sibling(parent / MARKER, marker.get("name")), _sibling(parent / MARKER, original.get("name"))
    if target is None or kept is None or os.path.lexists(target) or not kept.is_dir():
        return
    if _identity(kept) == original.get("identity"):  # not a folder that somebody has put there since
        kept.rename(target)
        fsync_path(parent)


def _remove_replaced(folder: Path) -> None:
    """Remove a folder whose place another one has: one of ours, or an original that is not to be kept."""
    owner = _replaced_by(folder.with_suffix(DRAFT))
    if owner is None:
        return
    original = owner.get(ORIGINAL_KEY)
    if not isinstance(original, dict):
        _remove_dead(folder)
        return
    with claimed(folder) as is_dead:
        if is_dead and original.get("keep") is False and original.get("name") == folder.name:
            shutil.rmtree(folder)


def _replaced_by(draft: Path) -> JsonObject | None:
    """The marker of the folder beside it that was written under this name."""
    for folder in draft.parent.iterdir():
        if folder != draft and folder.is_dir() and not folder.is_symlink():
            marker = read_marker(folder)
            if marker is not None and marker.get(DRAFT_KEY) == draft.name:
                return marker
    return None


def _sibling(path: Path, name: object) -> Path | None:
    """The path of a name that a marker holds; None for one that is no name."""
    try:
        found = path.with_name(Path(str(name)).name)
        found.lstat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError):
        return None
    if isinstance(name, str):
        return found
    return None


def _remove_dead(folder: Path) -> None:
    """Remove a draft or a replaced folder that no process uses and that holds only what one of us wrote."""
    with claimed(folder) as is_dead:
        if not is_dead or not folder.is_dir() or folder.is_symlink():
            return
        marker = read_marker(folder)
        if marker is None and not _is_barely_begun(folder):
            return
        if marker is not None and "entries" in marker and is_touched(folder):
            return
        remove_marked(folder)


def _is_barely_begun(folder: Path) -> bool:
    """Whether a folder holds nothing but a marker that was being written."""
    if not folder.is_dir() or folder.is_symlink():
        return False
    return all(path.name == MARKER or is_draft_file(path) for path in folder.iterdir())
