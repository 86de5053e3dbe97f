"""Which checkpoint of a run is meant where a command is given the run: the best one that it keeps, else the newest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.checkpoint import layout
from mindspeed_mm.core.artifacts import RunFolder
from mindspeed_mm.core.errors import CheckpointError, UsageError
from mindspeed_mm.core.json_file import parse_json

Which = int | str | None
"""A step, `best`, `newest`; None: the best where the run keeps one, else the newest."""
_KEY = "--checkpoint"


@dataclass(frozen=True)
class Choice:
    """What is opened, and why."""

    path: Path
    """The folder of a step; a run folder where the newest good checkpoint is meant."""
    why: str
    """`best by val_loss 3.16`, `newest`, `named`; empty where there was nothing to choose."""

    @property
    def folder(self) -> Path:
        """The folder of the step, of the newest one in a run folder."""
        steps = layout.list_iterations(self.path)
        if steps:
            return layout.checkpoint_folder(self.path, steps[-1])
        return self.path

    def __str__(self) -> str:
        return f"step {int(self.folder.name.removeprefix('iter_'))} ({self.why})"


def choose_checkpoint(path: Path, which: Which = None) -> Choice:
    """The checkpoint that a person means.

    Args:
        path: A run folder; any other is taken as it is.
        which: Of the run's checkpoints.

    Raises:
        CheckpointError: The run does not have it.
        UsageError: `which` is none of these words, or is given for something else than a run.
    """
    if (path / layout.MANIFEST).exists():  # ranks are given the words of the command again
        return Choice(path, "")
    steps = layout.list_iterations(path)
    if isinstance(which, str) and which.isdigit():
        which = int(which)
    if isinstance(which, str) and which not in ("best", "newest"):
        raise UsageError(f"'{which}' is no checkpoint", key=_KEY, way_out="Use best, newest or the number of a step.")
    if isinstance(which, int):
        if which not in steps:
            listed = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"has no step {which}", where=str(path), way_out=f"Steps here: {listed}.")
        return Choice(layout.checkpoint_folder(path, which), "named")
    if not steps:
        if which is not None:
            raise UsageError("is not a run with checkpoints", where=str(path), key=_KEY, way_out="Leave it out.")
        return Choice(path, "")
    best = best_of(path) if which != "newest" else None
    if best is not None:
        return Choice(layout.checkpoint_folder(path, best[0]), f"best {best[1]}")
    if which == "best":
        way_out = "Use newest, or set training.evaluate.best_metric in the run."
        raise CheckpointError("keeps no best checkpoint", where=str(path), key=_KEY, way_out=way_out)
    return Choice(path, "newest")


def best_of(run: Path) -> tuple[int, str] | None:
    """Step of the best checkpoint that a run keeps, and by which number; None where it keeps none, or it is gone."""
    try:
        found = parse_json(RunFolder(run).best.read_bytes())
        step, metric, value = int(found["step"]), str(found["metric"]), float(found["value"])
    except (OSError, ValueError, TypeError, LookupError):
        return None
    if not layout.checkpoint_folder(run, step).is_dir():
        return None
    return step, f"by {metric} {value:.4g}"
