"""Where a run starts: from weights, from its own newest checkpoint, or from another run's; and what a checkpoint's
manifest records of a run, which a resume compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from mindspeed_mm.checkpoint.layout import TRAINER_STATE, list_iterations
from mindspeed_mm.checkpoint.recognise import recognise
from mindspeed_mm.core.counts import is_count
from mindspeed_mm.core.errors import CheckpointError
from mindspeed_mm.core.version import __version__
from mindspeed_mm.fsdp.checkpoint.base_weights import base_weights_mark, weights_folder_of_load
from mindspeed_mm.fsdp.checkpoint.committed import verify_converted
from mindspeed_mm.fsdp.checkpoint.loading import (
    RESTORE,
    check_holds_adapters,
    check_holds_optimizer,
    check_tensors,
    load_state,
)
from mindspeed_mm.fsdp.checkpoint.loop_state import LoopState
from mindspeed_mm.fsdp.checkpoint.manager import CheckpointManager, CommittedCheckpoint
from mindspeed_mm.fsdp.checkpoint.manifest import RunContext
from mindspeed_mm.fsdp.checkpoint.resume import check_resumable
from mindspeed_mm.fsdp.checkpoint.tree import TrainedBeside
from mindspeed_mm.fsdp.data.dataloader.order import DataPosition
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.models.lora.apply import take_from_base
from mindspeed_mm.fsdp.optimizer.ema import Ema
from mindspeed_mm.fsdp.optimizer.loss_scale import LossScale
from mindspeed_mm.fsdp.params.loader import ResolvedConfig, resolved_dict
from mindspeed_mm.fsdp.params.rules.path import missing_input
from mindspeed_mm.fsdp.params.training_args import TrainingArguments
from mindspeed_mm.fsdp.train.run.train_options import ResumeOptions

Note = Callable[[str], None]


@dataclass(frozen=True)
class ResumePoint:
    """Where a run starts, and who writes its checkpoints."""

    manager: CheckpointManager | None = None
    checkpoint: CommittedCheckpoint | None = None
    reader: CheckpointManager | None = None
    """Reads `checkpoint`."""
    weights: Path | None = None
    """Hugging Face folder to take weights from instead of `model.model_name_or_path`."""
    weights_only: bool = False
    with_optimizer: bool = True

    @property
    def iteration(self) -> int:
        """The step that the run goes on after."""
        if self.checkpoint is None or self.weights_only:
            return 0
        return self.checkpoint.iteration or 0

    def load(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ema: Ema | None = None,
        beside: TrainedBeside | None = None,
    ) -> LoopState | None:
        """Load the checkpoint into a sharded model; returns the loop's state, None when the run starts at step 0. What
        is trained beside the model goes on with it; a run that starts at step 0 leaves it as it is."""
        if self.checkpoint is None or self.reader is None:
            return None
        with_optimizer = optimizer if self.with_optimizer else None
        own = None if self.weights_only else beside
        state = self.reader.load(self.checkpoint, model, with_optimizer, ema, own)
        take_from_base(model)
        if own is not None:
            take_from_base(own.model)
        if self.weights_only:
            return None
        return self._checked(state)

    def read_loop_state(self) -> LoopState | None:
        """The loop's state alone, as `load` returns it, but for random numbers."""
        if self.checkpoint is None or self.weights_only:
            return None
        return self._checked(load_state(self.checkpoint))

    def check_tensors(self, model: nn.Module) -> None:
        """Raise what `load` would for a checkpoint of another model, from its index alone.

        Args:
            model: As its folder and the configuration have it, whole; parameters may be on meta.

        Raises:
            CheckpointError: The checkpoint holds other tensors, or the state of an optimizer of others.
        """
        if self.checkpoint is not None and self.reader is not None:
            reads_optimizer = self.with_optimizer and not self.reader.training.no_load_optim
            check_tensors(self.checkpoint, model, with_optimizer=reads_optimizer)

    def _checked(self, state: Mapping[str, object]) -> LoopState:
        assert self.checkpoint is not None
        _check_state(state, self.checkpoint.path / TRAINER_STATE, self.checkpoint.iteration)
        return cast(LoopState, state)


def _check_state(state: Mapping[str, Any], path: Path, iteration: int | None) -> None:
    """Raise `CheckpointError` when the loop's state is not one of this step. Files are compared with the manifest
    before, but not under `training.verify_checkpoint: size` or `none`."""
    numbers = {name: state.get(name) for name in ("iteration", "consumed_samples", "skipped_in_a_row")}
    wrong = [name for name, number in numbers.items() if not is_count(number)]
    if iteration is not None and state.get("iteration") != iteration and "iteration" not in wrong:
        wrong.append("iteration")
    if not isinstance(state.get("bad_samples"), dict):
        wrong.append("bad_samples")
    try:
        DataPosition.from_dict(state["data_position"])
    except (AttributeError, KeyError, TypeError, ValueError):
        wrong.append("data_position")
    try:
        LossScale(1.0, 1, 1.0).load_state(state.get("loss_scale", {"value": 1.0, "good_steps": 0}))
    except (KeyError, TypeError, ValueError):
        wrong.append("loss_scale")
    if wrong:
        raise CheckpointError(
            f"is not a state of a training: {', '.join(wrong)} missing, mistyped or out of range",
            where=str(path),
            way_out=RESTORE,
        )


def find_resume_point(
    training: TrainingArguments,
    options: ResumeOptions,
    context: RunContext,
    *,
    note: Note,
    say: Note,
    clears_drafts: bool = True,
) -> ResumePoint:
    """Decide where the run starts, before anything large is built.

    A run's own checkpoints in `training.save` come first: running the same command again continues. Then
    `training.load`: another run, a DCP folder, or a Hugging Face folder of weights.

    Args:
        arguments: The whole configuration.
        options: Of the command line.
        context: Of the run, to be compared with that of the checkpoint.
        note: Tells the user what is remarkable.
        say: Tells the user where the run starts.
        clears_drafts: Remove what a killed save left in the run's own folder; False where nothing may be changed.

    Raises:
        CheckpointError: Checkpoints exist and none may be used; the message says why and what to do.
    """
    manager = None
    if training.save:
        manager = CheckpointManager(Path(training.save), training, context=context, note=note)
    if manager is not None and not options.resume:
        refuse_used_folder(manager.save_folder)
    elif manager is not None:
        own = manager.find_latest(allow_fresh=options.allow_fresh, clears_drafts=clears_drafts)
        if own is not None:
            return _from_own(own, manager, options, context, note, say)
    if training.load is None:
        return ResumePoint(manager)
    return _from_elsewhere(Path(training.load), training, options, context, manager, note, say)


def refuse_used_folder(save: Path) -> None:
    """Raise when the run folder holds checkpoints and the run does not go on from them."""
    if iterations := list_iterations(save):
        raise CheckpointError(
            f"holds a run already, saved up to step {iterations[-1]}",
            where=str(save),
            key="training.save",
            way_out="Say --resume auto to continue it, or give the new run a folder of its own.",
        )


def _from_own(
    checkpoint: CommittedCheckpoint,
    manager: CheckpointManager,
    options: ResumeOptions,
    context: RunContext,
    note: Note,
    say: Note,
) -> ResumePoint:
    if options.weights_only:
        # A run that began again in this folder would be taken for the older one as long as that is further.
        raise CheckpointError(
            "holds a run already; a run that starts from its weights needs a folder of its own",
            where=str(manager.save_folder),
            key="training.save",
            way_out=f"Say training.save=<new folder> training.load={manager.save_folder} --weights-only.",
        )
    _check_goes_on(checkpoint, options, context, note, with_optimizer=not manager.training.no_load_optim)
    say(f"resume from {checkpoint.path}")
    return ResumePoint(manager, checkpoint, manager)


def _check_goes_on(
    checkpoint: CommittedCheckpoint, options: ResumeOptions, context: RunContext, note: Note, *, with_optimizer: bool
) -> None:
    """Raise `CheckpointError` unless this is the run that saved the checkpoint, and it holds what the run needs."""
    for line in check_resumable(checkpoint.context, context, accept_data_change=options.accept_data_change):
        note(line)
    if with_optimizer:
        check_holds_optimizer(checkpoint)


def _from_elsewhere(
    load: Path,
    training: TrainingArguments,
    options: ResumeOptions,
    context: RunContext,
    manager: CheckpointManager | None,
    note: Note,
    say: Note,
) -> ResumePoint:
    if not load.exists():
        raise missing_input(load, "training.load", CheckpointError)
    kind = recognise(load) if training.load_format == "auto" else training.load_format
    reader = manager or CheckpointManager(load, training, context={}, note=note)
    verify_converted(
        load,
        reader.ranks,
        training.verify_checkpoint,
        say,
        from_first_rank=training.load_rank0_and_broadcast,
    )
    if kind in {"hf", "megatron"} or weights_folder_of_load(str(load)) is not None:
        say(f"weights from {load}")
        return ResumePoint(manager, weights=load)
    checkpoint = reader.open(load)
    # Weights without an optimizer, or from a run that kept no state of its loop, are a new run's beginning.
    weights_only = options.weights_only or training.no_load_optim or checkpoint.manifest is None
    if weights_only:
        wants_adapters = training.lora.enable
        reader.ranks.first("reading the index", lambda: check_holds_adapters(checkpoint, wants_adapters))
        say(f"weights from {checkpoint.path}; the run starts at step 0")
    else:
        _check_goes_on(checkpoint, options, context, note, with_optimizer=True)
        say(f"continue from {checkpoint.path}")
    return ResumePoint(manager, checkpoint, reader, weights_only=weights_only, with_optimizer=not weights_only)


# --- what is compared -------------------------------------------------------------------------------------------------


def run_context(
    config: ResolvedConfig, dataset: MMDataset, *, world_size: int, mesh: str, global_batch: int | None
) -> RunContext:
    """The context of `checkpoint.resume.check_resumable`, but for `batching`, which the loader knows.

    Args:
        config: The configuration.
        dataset: What is trained on.
        world_size: Ranks of the job.
        mesh: Its axes, in words.
        global_batch: Samples of an optimizer step; None where the number of ranks is not known.
    """
    training = config.arguments.training
    base = base_of_adapters(training) or config.arguments.model.model_name_or_path
    context: RunContext = {
        "world_size": world_size,
        "mesh": mesh,
        "config": resolved_dict(config),
        "dataset": dataset.fingerprint(),
        "global_batch": global_batch,
        "seed": training.seed,
        "versions": {"mindspeed-mm": __version__, "torch": torch.__version__},
    }
    if training.lora.enable and base:
        context["base_weights"] = base_weights_mark(Path(base))
    return context


def base_of_adapters(training: TrainingArguments) -> Path | None:
    """Other weights than those of the model folder, under adapters: no checkpoint of the run holds them."""
    if training.lora.enable:
        return weights_folder_of_load(training.load)
    return None
