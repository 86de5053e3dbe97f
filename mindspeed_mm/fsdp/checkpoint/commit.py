"""The commit protocol: a checkpoint is written under a temporary name, proven complete, and only then given its own.

A kill at any moment leaves either the checkpoint, whole, or none; what was committed before is never touched.
"""

from __future__ import annotations

import shutil
import time
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import safetensors.torch
import torch

from mindspeed_mm.checkpoint import layout
from mindspeed_mm.checkpoint.dcp_folder.storage import Tree, write_tree
from mindspeed_mm.core.artifacts import free_bytes, is_disk_full
from mindspeed_mm.core.errors import CheckpointError, MachineError
from mindspeed_mm.core.hashed_file import FileRecord, write_hashed
from mindspeed_mm.fsdp.checkpoint.manifest import Manifest, RunContext, verify_files
from mindspeed_mm.fsdp.checkpoint.tree import tree_bytes
from mindspeed_mm.fsdp.utils.ranks import Ranks

SPACE_MARGIN = 1.2

Result = TypeVar("Result")


@dataclass(frozen=True)
class CheckpointContents:
    """What one checkpoint holds; nothing in it changes any more while it is written."""

    iteration: int
    tree: Tree
    state: str
    """The trainer's state as JSON text, the same on every rank."""
    rng: dict[str, torch.Tensor]
    """This rank's random-number state; empty when it is not kept."""
    optimizer: str | None
    ties: dict[str, str] = field(default_factory=dict)
    dtype: str | None = None
    stages: float = 1.0
    """Size of the whole model over that of this rank's stages of a pipeline."""

    @property
    def bytes(self) -> int:
        """Size of all tensors over all ranks; with a pipeline it is estimated."""
        return round(tree_bytes(self.tree) * self.stages)


def commit_checkpoint(
    save: Path, contents: CheckpointContents, context: RunContext, ranks: Ranks, note: Callable[[str], None]
) -> Path:
    """Write a checkpoint and commit it. Called by all ranks; all return, or all raise.

    Args:
        save: The run folder.
        contents: What this rank brings.
        context: Goes into the manifest.
        ranks: All of them.
        note: Tells the user.

    Returns:
        The committed folder.

    Raises:
        MachineError: The disk is full, or cannot be written.
        CheckpointError: Another failure. In both cases nothing was committed, and the draft is gone.
    """
    draft = layout.draft_folder(save, contents.iteration)

    def explained(action: Callable[[], Result]) -> Callable[[], Result]:
        return partial(_explained, action, save, contents.bytes)

    try:
        ranks.first("making the folder", explained(lambda: _fresh_folder(draft)))
        records = ranks.each("writing", explained(lambda: _write(contents, draft, ranks)))
        manifest = _manifest(contents, dict(ChainMap(*records)), context, ranks.world_size)
        return ranks.first("committing", explained(lambda: _commit(draft, save, manifest, note)))
    except BaseException:
        if ranks.is_first:
            shutil.rmtree(draft, ignore_errors=True)
        raise


def check_space(save: Path, needed_bytes: int) -> str | None:
    """Compare what a save needs with what the disk has.

    Returns:
        A warning when the space is short of `SPACE_MARGIN` times the need, else None.

    Raises:
        MachineError: It cannot fit.
    """
    free = free_bytes(save)
    if free < needed_bytes:
        raise _disk_full(save, needed_bytes)
    if free < SPACE_MARGIN * needed_bytes:
        return f"warning: {save}: a checkpoint needs {needed_bytes:,} bytes and only {free:,} are free"
    return None


def _fresh_folder(draft: Path) -> None:
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)


def _write(contents: CheckpointContents, draft: Path, ranks: Ranks) -> dict[str, FileRecord]:
    """Write this rank's files; returns what they hold."""
    records = write_tree(contents.tree, draft, ranks)
    if contents.rng:
        name = layout.rng_file(ranks.rank)
        records[name] = write_hashed(draft / name, safetensors.torch.save(contents.rng))
    if ranks.is_first:
        records[layout.TRAINER_STATE] = write_hashed(draft / layout.TRAINER_STATE, contents.state.encode())
    return records


def _manifest(
    contents: CheckpointContents, files: dict[str, FileRecord], context: RunContext, world_size: int
) -> Manifest:
    return Manifest(
        iteration=contents.iteration,
        world_size=world_size,
        files=files,
        optimizer=contents.optimizer,
        ties=contents.ties,
        dtype=contents.dtype,
        context=context,
        time=time.time(),
    )


def _commit(draft: Path, save: Path, manifest: Manifest, note: Callable[[str], None]) -> Path:
    if problems := verify_files(draft, manifest.files, "size"):  # hosts that do not share the folder are found here
        raise CheckpointError(
            "rank 0 does not see what the other ranks wrote. Is training.save on a file system that all hosts share?",
            problems=problems,
        )
    # This order is the protocol: the manifest last into the draft, then the name, then the tracker.
    manifest.write(draft)
    folder = layout.checkpoint_folder(save, manifest.iteration)
    layout.commit(draft, folder, note)
    layout.write_tracker(save, manifest.iteration)
    return folder


def _explained(action: Callable[[], Result], save: Path, needed_bytes: int) -> Result:
    """Run `action` with the operating system's refusals put into a person's words."""
    try:
        return action()
    except OSError as error:
        if is_disk_full(error):
            raise _disk_full(save, needed_bytes) from error
        raise MachineError(
            f"could not be written: {error.strerror}",
            where=str(error.filename2 or error.filename or save),
            key="training.save",
            way_out="Nothing was committed; earlier checkpoints are intact.",
        ) from error


def _disk_full(save: Path, needed_bytes: int) -> MachineError:
    return MachineError(
        f"the disk is full: a checkpoint needs {needed_bytes:,} bytes, {free_bytes(save):,} are free",
        where=str(save),
        key="training.save",
        way_out="Make room or set training.save_total_limit. Nothing was committed; earlier checkpoints are intact.",
    )
