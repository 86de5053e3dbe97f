"""Finds the checkpoint to go on from: the newest that verifies, whatever the tracker says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from mindspeed_mm.checkpoint import layout
from mindspeed_mm.checkpoint.conversion.manifest import MANIFEST, converted_root, differences_of_share
from mindspeed_mm.checkpoint.recognise import recognise
from mindspeed_mm.core.errors import CheckpointError, Problem, first_problems
from mindspeed_mm.fsdp.checkpoint.manifest import (
    InvalidCheckpoint,
    Manifest,
    RunContext,
    Verification,
    read_manifest,
    verify_files,
)
from mindspeed_mm.fsdp.utils.ranks import Ranks


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A checkpoint that has been verified."""

    path: Path
    iteration: int | None
    """None for a checkpoint that comes from elsewhere and does not say."""
    manifest: Manifest | None
    """None for one that comes from elsewhere: nothing could be verified."""
    notes: tuple[str, ...] = ()
    """What a person should know: which newer checkpoints were skipped and why, that nothing could be verified."""

    @property
    def context(self) -> RunContext:
        """Context of the run that saved; empty for a checkpoint from elsewhere."""
        if self.manifest:
            return self.manifest.context
        return {}


def find_latest(
    save: Path,
    ranks: Ranks,
    verification: Verification,
    note: Callable[[str], None],
    *,
    allow_fresh: bool = False,
    clears_drafts: bool = True,
) -> CommittedCheckpoint | None:
    """The newest checkpoint of this run's own folder that verifies. Called by all ranks, who share the reading.

    Args:
        save: The run folder.
        ranks: All of them.
        verification: How closely files are compared with the manifest.
        note: Tells the user what was cleared, and which newer checkpoints were skipped and why.
        allow_fresh: Return None also when checkpoints are there but none is good.
        clears_drafts: Remove what a killed save left there. Only for the run that owns the folder now: to anybody else
            the draft may be that of a save under way.

    Returns:
        None when nothing was ever committed.

    Raises:
        CheckpointError: Checkpoints are there but none is good, or the newest comes from a newer version.
    """
    if clears_drafts:
        for name in ranks.first("clearing what a killed save left", lambda: layout.remove_leftovers(save)):
            note(f"cleared {name}, which a killed save had left")
    try:
        found = _newest_good(save, ranks, verification)
    except InvalidCheckpoint as error:
        if not allow_fresh:
            raise
        note(f"warning: {error}")
        return None
    if found is not None:
        for line in found.notes:
            note(line)
    return found


def open_checkpoint(path: Path, ranks: Ranks, verification: Verification) -> CommittedCheckpoint:
    """Verify the checkpoint that a person named: a run folder's newest good one, or one step's folder. Nothing is
    changed there. Called by all ranks.

    Raises:
        CheckpointError: It is damaged (an older one is offered), or is not a checkpoint of a run.
    """
    kind, folder = ranks.first("looking at the checkpoint", lambda: _resolve(path))
    if kind == "run":
        found = _newest_good(folder, ranks, verification)
        if found is None:
            raise CheckpointError("holds no checkpoint", where=str(path))
        return found
    if kind == "foreign":
        notes: tuple[str, ...] = ()
        if converted_root(folder) is None:
            notes = (f"{folder} has no {layout.MANIFEST}: it comes from elsewhere, and damage would not be noticed",)
        return CommittedCheckpoint(folder, None, None, notes)
    try:
        manifest = _verified(folder, ranks, verification)
    except InvalidCheckpoint as error:
        raise _offering_older(folder, error) from error
    return CommittedCheckpoint(folder, manifest.iteration, manifest)


def verify_converted(
    path: Path, ranks: Ranks, verification: Verification, say: Callable[[str], None], *, from_first_rank: bool
) -> None:
    """Compare a folder that a conversion wrote with the checksums that it left there; any other is left alone. Called
    by all ranks.

    Args:
        path: Weights in any layout.
        ranks: All of them.
        verification: Nothing is compared but under `hash`: the checksums are all that is noted.
        say: Tells the user what takes a while.
        from_first_rank: The others may not see the folder; else all share the reading.

    Raises:
        CheckpointError: A tensor is missing or another one, with its file and key.
    """
    if verification != "hash" or not ranks.first("looking for checksums", lambda: converted_root(path) is not None):
        return
    say(f"comparing {path} with its checksums")
    if from_first_rank:
        problems = ranks.first("verifying", lambda: differences_of_share(path, 0, 1))
    else:
        shares = ranks.each("verifying", lambda: differences_of_share(path, ranks.rank, ranks.world_size))
        problems = list(chain.from_iterable(shares))
    if problems:
        raise CheckpointError(
            f"{path}: {len(problems)} of what {MANIFEST} lists is not as it was written. Copy the folder again; to "
            "train on it as it is: training.verify_checkpoint=size.",
            problems=first_problems(problems),
        )


def _resolve(path: Path) -> tuple[str, Path]:
    """`("run", folder)`, `("ours", step folder)` or `("foreign", folder)`."""
    kind = recognise(path)
    if kind == "run":
        if layout.list_iterations(path) or layout.read_tracker(path) != layout.RELEASE:
            return "run", path
        path = path / layout.RELEASE
    elif kind != "dcp":
        way_out = (
            "Name a run, or one of its steps. Training starts from a Hugging Face folder, in model.model_name_or_path: "
            "`mm convert` makes one of other layouts."
        )
        if kind == "adapters":
            way_out = "Name it in training.lora.pretrained_lora_path to start from these adapters."
        what = f"is a folder of kind '{kind}', not a checkpoint of a run"
        raise CheckpointError(what, where=str(path), way_out=way_out)
    return ("ours" if (path / layout.MANIFEST).exists() else "foreign"), path


def _newest_good(save: Path, ranks: Ranks, verification: Verification) -> CommittedCheckpoint | None:
    """Walk committed steps downwards. Raises `InvalidCheckpoint` when there are some and none is good."""
    iterations, tracker = ranks.first(
        "looking for checkpoints", lambda: (layout.list_iterations(save), layout.read_tracker(save))
    )
    skipped: list[Problem] = []
    for iteration in reversed(iterations):
        folder = layout.checkpoint_folder(save, iteration)
        try:
            manifest = _verified(folder, ranks, verification)
        except InvalidCheckpoint as error:
            skipped += error.problems
            continue
        notes = [f"skipped {problem}" for problem in skipped]
        if tracker is not None and tracker not in map(str, iterations):
            notes.append(f"the tracker names step {tracker}, which is not there; step {iteration} is the newest")
        return CommittedCheckpoint(folder, iteration, manifest, tuple(notes))
    if iterations or tracker is not None:
        raise _none_is_good(save, skipped, tracker)
    return None


def _verified(folder: Path, ranks: Ranks, verification: Verification) -> Manifest:
    """The manifest of a folder whose files all agree with it."""
    manifest = ranks.first("reading the manifest", lambda: _manifest_of(folder))
    shares = ranks.each(
        "verifying",
        lambda: verify_files(folder, manifest.files, verification, part=ranks.rank, parts=ranks.world_size),
    )
    problems = list(dict.fromkeys(chain.from_iterable(shares)))
    if problems:
        raise InvalidCheckpoint(f"{folder.name} is damaged:", problems=problems)
    return manifest


def _manifest_of(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    if layout.checkpoint_folder(folder.parent, manifest.iteration) != folder and folder.name.startswith("iter_"):
        raise InvalidCheckpoint(f"holds step {manifest.iteration}, which its name contradicts", where=str(folder))
    return manifest


def _none_is_good(save: Path, skipped: Sequence[Problem], tracker: str | None) -> InvalidCheckpoint:
    problems = list(skipped) or [Problem(f"names step {tracker}, which does not exist", str(save / layout.TRACKER))]
    return InvalidCheckpoint(
        f"{save}: no checkpoint in it is good. Restore one, or add --allow-fresh to start from the beginning:",
        problems=problems,
    )


def _offering_older(folder: Path, error: InvalidCheckpoint) -> CheckpointError:
    iterations = []
    for iteration in layout.list_iterations(folder.parent):
        if layout.checkpoint_folder(folder.parent, iteration) < folder:
            iterations.append(iteration)
    if not iterations:
        return error
    older = layout.checkpoint_folder(folder.parent, iterations[-1])
    return CheckpointError(f"{folder.name} is damaged. An older one is {older}:", problems=error.problems)
