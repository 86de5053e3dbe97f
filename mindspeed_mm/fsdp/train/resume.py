"""Where a run starts: from weights, from its own newest checkpoint, or from another run's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from mindspeed_mm.core.errors import CheckpointError
from mindspeed_mm.fsdp.checkpoint.manager import CheckpointManager, CommittedCheckpoint
from mindspeed_mm.fsdp.checkpoint.recognise import recognise
from mindspeed_mm.fsdp.checkpoint.resume import check_resumable
from mindspeed_mm.fsdp.params.argument import Arguments


class ResumeOptions(Protocol):
    """The part of the command line that decides where a run starts."""

    resume: bool
    weights_only: bool
    allow_fresh: bool
    accept_data_change: bool


@dataclass(frozen=True)
class ResumePoint:
    """Where a run starts, and who writes its checkpoints."""

    manager: CheckpointManager | None = None
    checkpoint: CommittedCheckpoint | None = None
    source: CheckpointManager | None = None
    """Reads `checkpoint`; another run's manager when `training.load` names one."""
    weights: Path | None = None
    """Hugging Face folder to take weights from instead of `model.model_name_or_path`."""
    weights_only: bool = False
    with_optimizer: bool = True

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Load the checkpoint into a sharded model; returns the loop's state, None when the run starts at step 0."""
        if self.checkpoint is None or self.source is None:
            return None
        state = self.source.load(self.checkpoint, model, optimizer if self.with_optimizer else None)
        return None if self.weights_only else state


def find_resume_point(
    arguments: Arguments, options: ResumeOptions, context: dict[str, Any], note: Callable[[str], None]
) -> ResumePoint:
    """Decide where the run starts, before anything large is built.

    A run's own checkpoints in `training.save` come first: running the same command again continues. Then
    `training.load`: another run, a DCP folder, or a Hugging Face folder of weights.

    Raises:
        CheckpointError: Checkpoints exist and none may be used; the message says why and what to do.
    """
    training = arguments.training
    manager = CheckpointManager(Path(training.save), training, context=context) if training.save else None
    if manager is not None and options.resume:
        own = manager.find_latest(allow_fresh=options.allow_fresh)
        if own is not None:
            for line in check_resumable(own.context, context, accept_data_change=options.accept_data_change):
                note(line)
            note(f"resume from {own.path}")
            return ResumePoint(manager, own, manager, weights_only=options.weights_only)
    if training.load is None:
        return ResumePoint(manager)
    return _from_elsewhere(Path(training.load), arguments, options, manager, note)


def _from_elsewhere(
    load: Path,
    arguments: Arguments,
    options: ResumeOptions,
    manager: CheckpointManager | None,
    note: Callable[[str], None],
) -> ResumePoint:
    kind = recognise(load) if arguments.training.load_format == "auto" else arguments.training.load_format
    if kind == "megatron":
        raise CheckpointError(
            "is a Megatron-style checkpoint, which this version does not read",
            where=str(load),
            key="training.load",
            way_out="Name a Hugging Face folder, a run folder or a DCP folder.",
        )
    if kind == "hf":
        note(f"weights from {load}")
        return ResumePoint(manager, weights=load)
    source = CheckpointManager(load, arguments.training, context={})
    checkpoint = source.find_latest()
    note(f"start from {checkpoint.path if checkpoint else load}")
    weights_only = options.weights_only or arguments.training.no_load_optim
    return ResumePoint(manager, checkpoint, source, weights_only=options.weights_only, with_optimizer=not weights_only)
