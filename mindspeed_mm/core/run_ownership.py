"""Whether a folder may become, or go on being, a run folder: a run writes under names of its own, and never
over the files of others."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mindspeed_mm.core.artifacts import RunFolder, atomic_write_text, make_writable_folder
from mindspeed_mm.core.errors import ConfigError, MachineError, MMError, UsageError
from mindspeed_mm.core.folder_kinds import (
    EXPORT_PLACES,
    MARKER,
    MARKER_FORMAT,
    RUN_KIND,
    is_checkpoint,
    is_model,
    is_run,
    kind_above,
)
from mindspeed_mm.core.folder_writing import resolve_output

_KEY = "training.save"
_NAMES = (
    "config.yaml", "resolved.yaml", "run.json", "metrics.jsonl", "events.jsonl", "log", "tb", "eval", "samples",
    "rollouts", "report.html", "model", "rows", "latest_checkpointed_iteration.txt", "best.json", *EXPORT_PLACES,
)  # fmt: skip


def check_run_folder(folder: Path, config: Path | None = None) -> Path:
    """Refuse a folder in which a run would overwrite files that are not its own. Changes nothing.

    Args:
        folder: `training.save`.
        config: The YAML that is trained. It may lie in the folder, and is left as it is.

    Returns:
        The folder, absolute and without links.

    Raises:
        MachineError: It cannot be read, or a file of another program is where a run keeps its lock.
        ConfigError: The folder is, or is inside, a model folder or a checkpoint; or it is not a run folder and holds
            files under names that a run writes; or the YAML is one that a run has written itself.
    """
    try:
        target = resolve_output(folder)
    except UsageError as error:
        problem = error.problems[0]
        raise ConfigError(problem.what, where=problem.where, key=_KEY, way_out=problem.way_out) from error
    try:
        _refuse_place(target)
        if target.exists() and not is_run(target):
            _refuse_foreign(target, config)
        RunFolder(target).check_lock_file()
    except PermissionError as error:
        raise MachineError(
            f"cannot be read: {error.strerror}", where=str(target), key=_KEY, way_out="Name another folder."
        ) from error
    if config is not None and config.resolve() == RunFolder(target).resolved:
        raise ConfigError(
            "was written by the run itself and would be overwritten",
            where=str(config),
            key=_KEY,
            way_out="Copy it to another name first.",
        )
    return target


def others_files(folder: Path, config: Path | None = None) -> int:
    """How many files and folders lie in a run folder that are not under names of a run's; the YAML that is trained does
    not count.

    Raises:
        MachineError: The folder, which the run has made, is gone.
    """
    own_yaml = config and config.resolve()
    own_names = {*_NAMES, MARKER, RunFolder(folder).lock_file.name}
    count = 0
    try:
        lying = list(folder.iterdir())
    except FileNotFoundError as error:
        way_out = "Run the command again, which makes it anew."
        what = "the run folder has been removed while the run began"
        raise MachineError(what, where=str(folder), way_out=way_out) from error
    for path in lying:
        is_own = path.name in own_names or path.name.startswith("iter_") or path.resolve() == own_yaml
        count += not is_own
    return count


def mark_run_folder(folder: Path) -> None:
    """Make the folder and its marker, before anything else is written there. Every rank may do so.

    Raises:
        MachineError: The folder cannot be written.
    """
    make_writable_folder(folder)
    if is_run(folder):
        return
    try:
        atomic_write_text(folder / MARKER, json.dumps({"format": MARKER_FORMAT, "kind": RUN_KIND}) + "\n")
    except FileNotFoundError:  # another rank, under the same number on another host, was first
        if not is_run(folder):
            raise


def folders_to_make(folder: Path | None) -> list[Path]:
    """The folder and those above it that do not exist yet, the deepest first."""
    if folder is None:
        return []
    return [path for path in (folder, *folder.parents) if not os.path.lexists(path)]


@contextmanager
def leaving_no_unbegun_run(folder: Path | None) -> Iterator[None]:
    """A run folder that is made inside goes away again where a refusal ends the body before the run has begun."""
    made = folders_to_make(folder)
    try:
        yield
    except MMError:
        clear_unbegun_run(made)
        raise


def clear_unbegun_run(made: Sequence[Path]) -> None:
    """Remove a run folder that holds nothing but what is written before a run begins: its marker, its log and notes.

    Args:
        made: What `folders_to_make` said before; what was there already, and what anything else is in, stays.
    """
    if not made or not is_run(made[0]):
        return
    run = RunFolder(made[0])
    early = {MARKER, run.log.name, run.events.name}
    with suppress(OSError):  # ranks of one job do so at the same time
        if {path.name for path in run.path.iterdir()} <= early:
            for path in (*run.log.glob("*"), run.events):
                path.unlink(missing_ok=True)
            if run.log.is_dir():
                run.log.rmdir()
            (run.path / MARKER).unlink(missing_ok=True)
            for path in made:
                path.rmdir()


def _refuse_foreign(target: Path, config: Path | None) -> None:
    found = [name for name in _NAMES if os.path.lexists(target / name)]
    if config is not None and config.resolve().parent == target:
        found = [name for name in found if name != config.resolve().name]
    found += [path.name for path in target.glob("iter_*")]
    if found and not is_run(target):  # another rank may have begun the run meanwhile
        raise ConfigError(
            f"is not a run folder and holds {', '.join(sorted(found)[:3])}, which a run would overwrite",
            where=str(target),
            key=_KEY,
            way_out="Name a new folder.",
        )


def _refuse_place(target: Path) -> None:
    if is_model(target):
        what = f"is a model folder, {target}"
    elif is_checkpoint(target):
        what = f"is a checkpoint, {target}"
    else:
        kind, above = kind_above(target) or ("a run folder", target)
        if kind == "a run folder":
            return
        what = f"lies in {kind}, {above}"
    raise ConfigError(what, where=str(target), key=_KEY, way_out="Name a new folder.")
