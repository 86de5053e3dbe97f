"""The one door through which a folder is written: it appears whole under its name, and replaces nothing but what came
through this door before.

While it is written it is called `.mindspeed-mm-<digits>.draft` beside its final place, and its writer holds a lock on
it. To replace a folder, the two change places in one step. Where the file system cannot do that, the old one is put
aside for a moment, as `.mindspeed-mm-<digits>.former` or under the name that it is kept under. `heal` recognises what a
killed writer left by name, marker and free lock: drafts are removed, and a folder that was put aside comes back.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mindspeed_mm.core.artifacts import (
    atomic_write_text,
    fsync_path,
    fsync_tree,
    make_writable_folder,
    one_at_a_time,
)
from mindspeed_mm.core.drafts import DRAFT, FORMER, locked, new_name
from mindspeed_mm.core.errors import MachineError, UsageError
from mindspeed_mm.core.exchange import swap_folders
from mindspeed_mm.core.folder_kinds import (
    MARKER,
    MARKER_FORMAT,
    changed_entries,
    foreign_entries,
    is_checkpoint,
    is_run,
    is_touched,
    kind_above,
    read_marker,
    stamps_of,
)
from mindspeed_mm.core.healing import BACKUP, DRAFT_KEY, ORIGINAL_KEY, heal, note_original, remove_marked
from mindspeed_mm.core.version import __version__

_LONGEST_SHOWN = 120
_KEPT_KEY = "kept"
"""In the marker of a folder that was converted in place: where its original is kept."""


@contextmanager
def atomic_folder(path: Path, *, overwrite: bool = False, sources: Sequence[Path] = ()) -> Iterator[Path]:
    """A folder that appears under its name only when its content is complete and on the disk.

    Args:
        path: The final name; of a link, where it leads.
        overwrite: Replace what a writer of ours has written there.
        sources: Files and folders that are read meanwhile: the target may neither be one of them, nor hold one, nor lie
            in one.

    Yields:
        A folder beside it to write into. It is removed when the body raises.

    Raises:
        UsageError: The target may not be written; see `check_target`.
        MachineError: Its parent cannot be written.
    """
    target = check_target(path, overwrite=overwrite, sources=sources)
    make_writable_folder(target.parent)
    heal(target.parent)
    target = check_target(path, overwrite=overwrite, sources=sources)  # it may have come back
    with _locked_draft(target) as draft:
        try:
            yield draft
            _complete(draft, target)
            _put_in_place(draft, target, overwrite)
        except BaseException:
            with suppress(OSError):
                remove_marked(draft)
            raise


@contextmanager
def folder_in_place(path: Path, *, keep: bool = True) -> Iterator[Path]:
    """A new content for a folder that is read meanwhile. It is built beside it; once it is complete it takes its place.

    Args:
        path: The folder; of a link, where it leads.
        keep: Keep the original as `<name>.bak`. Where it is kept from an earlier conversion in place, whose result is
            as it was written, that result is not kept beside it.

    Yields:
        A folder beside it to write into. It is removed when the body raises.

    Raises:
        UsageError: It cannot be replaced, or `<name>.bak` exists already and is not its original.
        MachineError: Its parent cannot be written.
    """
    target = resolve_output(path)
    if target.parent.is_dir():
        heal(target.parent)
    backup = {_KEPT_KEY: backup_of(target).name} if keep else {}
    # of an earlier conversion in place the first original stays, not its result
    keep = keep and not _keeps_original(target)
    _refuse_in_place(target, keep)
    make_writable_folder(target.parent)
    with _locked_draft(target) as draft:
        kept_as = backup_of(target) if keep else draft.with_suffix(FORMER)
        try:
            yield draft
            _complete(draft, target, {ORIGINAL_KEY: note_original(target, kept_as, keep=keep), **backup})
            with locked(target):
                with one_at_a_time(target.parent):
                    # Looked at again under the lock: another process may have changed the folder
                    # since.
                    _refuse_in_place(target, keep)
                    swap_folders(draft, target, kept_as)
                    # A rename is on the disk only when the folder around it is.
                    fsync_path(target.parent)
                if not keep:
                    shutil.rmtree(kept_as)
        except BaseException:
            with suppress(OSError):
                remove_marked(draft)
            raise


def backup_of(path: Path) -> Path:
    """Where `folder_in_place` keeps the original: `<name>.bak`."""
    target = resolve_output(path)
    return target.with_name(target.name + BACKUP)


def _keeps_original(target: Path) -> bool:
    """Whether a conversion in place wrote a folder, nobody changed it since, and its original is still there."""
    backup = backup_of(target)
    is_ours = (read_marker(target) or {}).get(_KEPT_KEY) == backup.name
    return is_ours and backup.is_dir() and not is_touched(target)


def _run_or_checkpoint(target: Path) -> str:
    if is_run(target):
        return "is a run folder"
    return "is a checkpoint"


def _refuse_in_place(target: Path, keep: bool) -> None:
    if not target.is_dir():
        raise _refusal(target, "is not a folder", "Name the folder that is converted.")
    if os.path.ismount(target) or target in (Path.cwd(), *Path.cwd().parents):
        raise _refusal(target, "cannot be replaced while it is a mount point or the working directory")
    if is_run(target) or is_checkpoint(target):
        raise _refusal(target, _run_or_checkpoint(target))
    if keep and os.path.lexists(backup := backup_of(target)):
        raise _refusal(backup, "already exists, and the original is kept under this name", "Move it elsewhere first.")


def check_target(path: Path, *, overwrite: bool = False, sources: Sequence[Path] = ()) -> Path:
    """The folder that may be written under this name. Changes nothing.

    Args:
        path: As a person named it.
        overwrite: As `atomic_folder`.
        sources: As `atomic_folder`.

    Returns:
        It, absolute and without links.

    Raises:
        UsageError: The name cannot be used; it leads nowhere; it is a file, a mount point or the working directory; it
            is, holds or lies in a source, or lies in a run, a checkpoint or a model folder; it holds something that no
            writer of ours wrote, or that was changed since; or it holds what one wrote, and `overwrite` was not said.
        MachineError: It cannot be looked at.
    """
    target = resolve_output(path)
    try:
        _refuse_place(target, sources)
        _refuse_occupied(target, overwrite)
    except PermissionError as error:
        raise MachineError(
            f"cannot be read: {error.strerror}", where=str(target), way_out="Choose another folder."
        ) from error
    return target


def resolve_output(path: Path) -> Path:
    """Where something is written that a person named: absolute and without links.

    Raises:
        UsageError: The name cannot be used, or is a link that leads nowhere.
    """
    shown = repr(str(path))[1:-1]  # a name may hold control characters
    if len(shown) > _LONGEST_SHOWN:
        shown = f"{shown[:_LONGEST_SHOWN]}…"
    try:
        target = path.resolve()
        if path.is_symlink() and not target.exists():
            raise UsageError("is a link that leads nowhere", where=shown, way_out="Name the folder itself.")
        target.exists()  # raises where the name is too long
    except PermissionError as error:
        raise MachineError(f"cannot be read: {error.strerror}", where=shown, way_out="Choose another.") from error
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot be a path: {reason}", where=shown, way_out="Choose another name.") from error
    return target


def _refuse_place(target: Path, sources: Sequence[Path]) -> None:
    for source in (source.resolve() for source in sources):
        if target == source or target in source.parents or source in target.parents:
            how = "lies in"
            if target == source:
                how = "is"
            elif target in source.parents:
                how = "holds"
            raise _refusal(target, f"{how} the input, {source}")
    if (above := kind_above(target)) is not None:
        raise _refusal(target, f"lies in {above[0]}, {above[1]}")
    working = Path.cwd()
    if target == working:
        raise _refusal(target, "is the working directory")
    if target in working.parents:
        raise _refusal(target, "holds the working directory")
    if os.path.ismount(target):
        raise _refusal(target, "is a mount point, which cannot be replaced", f"Name a folder in it: {target / 'model'}")


def _refuse_occupied(target: Path, overwrite: bool) -> None:
    if target.exists() and not target.is_dir():
        raise _refusal(target, "is a file, not a folder")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if is_run(target) or is_checkpoint(target):
        raise _refusal(target, _run_or_checkpoint(target))
    foreign = foreign_entries(target)
    if foreign:
        what = "file or folder" if len(foreign) == 1 else "files or folders"
        raise _refusal(target, f"holds {len(foreign)} {what} that no mm command wrote there ({_some(foreign)})")
    changed = changed_entries(target)
    if changed:
        files = "file" if len(changed) == 1 else "files"
        raise _refusal(
            target,
            f"holds {len(changed)} {files} that, by size or date, changed after an mm command wrote there "
            f"({_some(changed)})",
            "Choose another folder, or delete this one yourself if nothing in it is needed.",
        )
    if not overwrite:
        raise _refusal(target, "the target exists", "Choose another folder, or add --overwrite to replace it.")


def _refusal(target: Path, why: str, way_out: str = "Choose another folder.") -> UsageError:
    return UsageError(why, where=str(target), way_out=way_out)


def _some(names: Sequence[str]) -> str:
    shown = list(names[:3])
    if len(names) > 3:
        shown.append("…")
    return ", ".join(shown)


def remove_written(folder: Path) -> bool:
    """Take away a folder that a writer of ours made, unless somebody has put something into it or changed what is
    there; whether it is gone."""
    if read_marker(folder) is None or folder.is_symlink() or is_touched(folder):
        return False
    doomed = new_name(folder.parent, DRAFT)  # no half of it looks whole
    with locked(folder):
        # The marker names the draft before the folder moves: `heal` removes it if this process is killed in
        # between.
        _write_marker(folder, {**(read_marker(folder) or {}), DRAFT_KEY: doomed.name})
        folder.rename(doomed)
        remove_marked(doomed)
    return True


def copy_plain(source: Path, target: Path) -> None:
    """Copy a file, or a folder with all that it holds, with the rights that new files and folders get: a source may be
    another user's, or read-only. Markers are not copied: they are about the source."""
    if not source.is_dir():
        shutil.copyfile(source, target)
        return
    target.mkdir()
    for path in sorted(source.iterdir()):
        if path.name != MARKER:
            copy_plain(path, target / path.name)


# --- drafts ----------------------------------------------------------------------------------------------------------


@contextmanager
def _locked_draft(target: Path) -> Iterator[Path]:
    """A new draft beside the target. While this process lives, no other one takes it for left over."""
    draft = new_name(target.parent, DRAFT)
    with ExitStack() as stack:
        with one_at_a_time(target.parent):
            draft.mkdir()
            stack.enter_context(locked(draft))
        _write_marker(draft, {"name": target.name, DRAFT_KEY: draft.name})
        yield draft


def _complete(draft: Path, target: Path, notes: Mapping[str, object] | None = None) -> None:
    """Everything is forced to the disk; then the marker says what belongs to the folder."""
    # content before the marker: a marker that is there vouches for everything that it lists
    fsync_tree(draft)
    listed = {"name": target.name, DRAFT_KEY: draft.name, "version": __version__, "entries": stamps_of(draft)}
    _write_marker(draft, {**listed, **(notes or {})})


def _write_marker(folder: Path, content: Mapping[str, object]) -> None:
    atomic_write_text(folder / MARKER, json.dumps({"format": MARKER_FORMAT, **content}, indent=1) + "\n")


def _put_in_place(draft: Path, target: Path, overwrite: bool) -> None:
    """Give a draft its name; what stood there goes away only after that, and only if it is still ours."""
    if not overwrite or not target.exists() or not any(target.iterdir()):
        _rename_to_free_name(draft, target)
        fsync_path(target.parent)
        return
    former = draft.with_suffix(FORMER)
    with locked(target):
        swap_folders(draft, target, former)
        fsync_path(target.parent)
        # looked at only now that nobody can find it under its old name
        if touched := foreign_entries(former) or changed_entries(former):
            swap_folders(former, target, draft)
            raise _refusal(target, f"'{touched[0]}' was added or changed in the meantime")
        with suppress(PermissionError):  # what somebody has made read-only is left to him: the new one is in place
            remove_marked(former)


def _rename_to_free_name(draft: Path, target: Path) -> None:
    try:
        draft.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise _refusal(target, "another process wrote it in the meantime") from error
