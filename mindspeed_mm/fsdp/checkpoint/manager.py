"""Saves, finds and loads the checkpoints of one run, in the background too, and deletes old ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

from mindspeed_mm.checkpoint import layout
from mindspeed_mm.checkpoint.dcp_folder.storage import Tree
from mindspeed_mm.core.errors import CheckpointError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.checkpoint import committed
from mindspeed_mm.fsdp.checkpoint.commit import CheckpointContents, check_space, commit_checkpoint
from mindspeed_mm.fsdp.checkpoint.committed import CommittedCheckpoint
from mindspeed_mm.fsdp.checkpoint.loading import load_beside, load_rng, load_state, load_tensors
from mindspeed_mm.fsdp.checkpoint.manifest import RunContext, read_manifest, verify_files
from mindspeed_mm.fsdp.checkpoint.tree import (
    BESIDE,
    BESIDE_OPTIMIZER,
    MODEL,
    OPTIMIZER,
    TrainedBeside,
    average_tensors,
    cast_floats,
    model_tensors,
    optimizer_tensors,
    snapshot,
    tied_names,
)
from mindspeed_mm.fsdp.models.structure.stages import whole_of
from mindspeed_mm.fsdp.optimizer.build import kind_of
from mindspeed_mm.fsdp.optimizer.ema import Ema
from mindspeed_mm.fsdp.params.training_args import TrainingArguments
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype
from mindspeed_mm.fsdp.utils.ranks import Ranks

__all__ = ["CheckpointManager", "CommittedCheckpoint"]


class CheckpointManager:
    """Every rank makes one, at the same moment, and calls every method at the same moment.

    Args:
        save: The run folder.
        training: The `training` section.
        context: What the manifest records of the run: `config`, `dataset`, `global_batch`, `world_size`, `mesh`,
            `versions`; compared by `resume.check_resumable`.
        note: Tells the user; ranks that are not to speak ignore it.
    """

    def __init__(
        self, save: Path, training: TrainingArguments, *, context: RunContext, note: Callable[[str], None]
    ) -> None:
        self.save_folder = save
        self.training = training
        self.context = context
        self.note = note
        self.ranks = Ranks(training.save_timeout_s)
        self.kept_step: int | None = None
        """Its checkpoint is never deleted."""
        self._last_saved: int | None = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if training.save_async else None
        self._under_way: Future[None] | None = None

    def save(
        self,
        iteration: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, object],
        ema: Ema | None = None,
        beside: TrainedBeside | None = None,
    ) -> None:
        """Commit `iter_<iteration>`, or start to when `training.save_async`: training may go on at once.

        Args:
            iteration: Steps done.
            model: Its parameters and persistent buffers are kept.
            optimizer: Its state is kept unless `training.no_save_optim`.
            state: JSON values, the same on every rank, and under `rng` this rank's tensors.
            ema: The average of the weights, kept in full precision whatever `training.save_ckpt_dtype` says.
            beside: What is trained beside the model, kept with its optimizer as the model is.

        Raises:
            CheckpointError: This save, or the one that was under way, failed, on all ranks alike. An earlier failure
                does not keep this save from being made.
        """
        earlier_failure = self._settle()
        if self._last_saved != iteration:
            self._start(lambda: self._collect(iteration, model, optimizer, state, ema, beside))
        if earlier_failure is not None:
            raise earlier_failure

    def _start(self, collect: Callable[[], CheckpointContents]) -> None:
        contents = self.ranks.together("collecting", collect)
        self.ranks.first("checking the disk", lambda: self._check_space(contents))
        if self._background is None:
            self._commit(contents)
        else:
            self._under_way = self._background.submit(self._commit, contents)
            self._under_way.add_done_callback(self._report_failure)

    def wait(self) -> None:
        """Return when no save is under way; call it before the process ends.

        Raises:
            CheckpointError: The save that was under way failed. It is told once.
        """
        failure = self._settle()
        if failure is not None:
            raise failure

    def _settle(self) -> BaseException | None:
        """Wait for the save that is under way; how it failed, if it did."""
        future, self._under_way = self._under_way, None
        if future is not None:
            return future.exception()
        return None

    def is_saved(self, iteration: int) -> bool:
        """Whether the save of a step was committed, or is under way."""
        return self._last_saved == iteration or self._under_way is not None

    def find_latest(self, *, allow_fresh: bool = False, clears_drafts: bool = True) -> CommittedCheckpoint | None:
        """The newest good checkpoint of this run's folder; see `committed.find_latest`."""
        return committed.find_latest(
            self.save_folder,
            self.ranks,
            self.training.verify_checkpoint,
            self.note,
            allow_fresh=allow_fresh,
            clears_drafts=clears_drafts,
        )

    def open(self, path: Path) -> CommittedCheckpoint:
        """A checkpoint anywhere: a run folder, a step's folder, one from elsewhere; see `committed.open_checkpoint`."""
        found = committed.open_checkpoint(path, self.ranks, self.training.verify_checkpoint)
        for line in found.notes:
            self.note(line)
        return found

    def load(
        self,
        checkpoint: CommittedCheckpoint,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        ema: Ema | None = None,
        beside: TrainedBeside | None = None,
    ) -> JsonObject:
        """Fill a sharded model, its parameters off the meta device, and its optimizer.

        Args:
            checkpoint: From `find_latest` or `open`.
            model: Under any plan and world size.
            optimizer: None takes the weights only.
            ema: The average of the weights. With the weights only, and from a checkpoint that has no average, it starts
                from the loaded weights, and the log says so.
            beside: What is trained beside the model; a checkpoint without it leaves it as it is, and the log says so.

        Returns:
            What was given to `save` as `state`, with `rng` None when it cannot be this rank's.

        Raises:
            CheckpointError: It was saved from another model or by another optimizer.
        """
        read_optimizer = None if self.training.no_load_optim else optimizer
        read_average = None if optimizer is None else ema
        has_average = load_tensors(checkpoint, model, read_optimizer, self.ranks, read_average)
        if beside is not None and not load_beside(
            checkpoint, beside, self.ranks, with_optimizer=not self.training.no_load_optim
        ):
            self.note(f"{checkpoint.path}: holds no critic, which starts anew")
        if ema is not None and not has_average:
            ema.restart()
            self.note(f"{checkpoint.path}: the {ema.called} starts from the weights loaded")
        rng = None if self.training.no_load_rng else load_rng(checkpoint, self.ranks)
        return {**load_state(checkpoint), "rng": rng}

    def _collect(
        self,
        iteration: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, object],
        ema: Ema | None,
        beside: TrainedBeside | None,
    ) -> CheckpointContents:
        dtype = self.training.save_ckpt_dtype
        tree: Tree = {MODEL: cast_floats(model_tensors(model), torch_dtype(dtype))}
        with_optimizer = not self.training.no_save_optim
        if with_optimizer:
            tree[OPTIMIZER] = optimizer_tensors(model, optimizer)
        if ema is not None:
            tree[ema.key] = average_tensors(ema)
        if beside is not None:
            tree[BESIDE] = cast_floats(model_tensors(beside.model), torch_dtype(dtype))
            if with_optimizer:
                tree[BESIDE_OPTIMIZER] = optimizer_tensors(beside.model, beside.optimizer)
        rng = state.get("rng")
        if self.training.no_save_rng or not isinstance(rng, dict):
            rng = {}
        if self._background:
            tree = snapshot(tree)
        plain_state = {key: value for key, value in state.items() if key != "rng"}
        return CheckpointContents(
            iteration=iteration,
            tree=tree,
            state=json.dumps(plain_state, indent=1),
            rng={name: tensor.detach().to("cpu", copy=True) for name, tensor in rng.items()},
            optimizer=kind_of(optimizer) if with_optimizer else None,
            ties=tied_names(whole_of(model)),
            dtype=dtype,
            stages=_numbers(whole_of(model)) / max(1, _numbers(model)),
        )

    def _check_space(self, contents: CheckpointContents) -> None:
        if warning := check_space(self.save_folder, contents.bytes):
            self.note(warning)

    def _commit(self, contents: CheckpointContents) -> None:
        commit_checkpoint(self.save_folder, contents, self.context, self.ranks, self.note)
        self._last_saved = contents.iteration
        self.ranks.first("deleting old checkpoints", self._prune)

    def _prune(self) -> None:
        try:
            gone = prune(self.save_folder, self.training.save_total_limit, self.kept_step)
        except OSError as error:  # the new checkpoint is committed: nothing is lost
            self.note(f"warning: old checkpoints could not be deleted: {error}")
            return
        for iteration in gone:
            self.note(f"deleted {layout.checkpoint_folder(self.save_folder, iteration)}")

    def _report_failure(self, future: Future[None]) -> None:
        """Said at once; raised by the next `save` or `wait`."""
        if error := future.exception():
            self.note(f"warning: the save in the background failed: {error}")


def _numbers(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# --- which old checkpoints go -----------------------------------------------------------------------------------------


FEWEST_KEPT = 2


def prune(save: Path, save_total_limit: int | None, kept: int | None = None) -> list[int]:
    """Delete the oldest complete checkpoints beyond the limit and return their steps.

    Args:
        save: The run folder.
        save_total_limit: How many to keep, at least 2; None keeps all. Damaged ones do not count and are left alone.
        kept: A step whose checkpoint stays however old it is.
    """
    if save_total_limit is None:
        return []
    complete = [step for step in layout.list_iterations(save) if _is_complete(layout.checkpoint_folder(save, step))]
    doomed = [step for step in complete[: -max(save_total_limit, FEWEST_KEPT)] if step != kept]
    for step in doomed:
        layout.remove_checkpoint(layout.checkpoint_folder(save, step))
    return doomed


def _is_complete(folder: Path) -> bool:
    try:
        return not verify_files(folder, read_manifest(folder).files, "size")
    except CheckpointError:
        return False
