"""Saves checkpoints while training, and beside each of them, with `save_format: hf`, what was trained as transformers,
PEFT or diffusers load it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import nn

from mindspeed_mm.checkpoint.layout import checkpoint_folder, put_aside
from mindspeed_mm.core.errors import MMError
from mindspeed_mm.core.folder_kinds import is_touched
from mindspeed_mm.core.folder_writing import remove_written
from mindspeed_mm.fsdp.checkpoint.adapters import save_adapters
from mindspeed_mm.fsdp.checkpoint.manager import CheckpointManager
from mindspeed_mm.fsdp.data.data_utils.training_view import view_writer
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.params.training_args import TrainingArguments
from mindspeed_mm.fsdp.train.family import Family, WholeSave
from mindspeed_mm.fsdp.train.run.parts import RunParts
from mindspeed_mm.fsdp.train.run.random_state import capture_rng
from mindspeed_mm.fsdp.train.run.record import RunRecord
from mindspeed_mm.fsdp.train.run.resume import base_of_adapters
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype
from mindspeed_mm.fsdp.utils.ranks import Ranks


def checkpoint_hook(parts: RunParts) -> CheckpointHook | None:
    """The hook, where there is a run folder to save in."""
    if parts.resume.manager is None:
        return None
    training = parts.arguments.training
    return CheckpointHook(parts.resume.manager, training, parts.record, _hugging_face_saves(parts))


def _hugging_face_saves(parts: RunParts) -> HuggingFaceSaves | None:
    training = parts.arguments.training
    model_folder = base_of_adapters(training) or parts.arguments.model.model_name_or_path
    if training.save_format != "hf" or not training.save or not model_folder:
        return None
    return HuggingFaceSaves(
        Path(training.save),
        Path(model_folder),
        parts.family,
        torch_dtype(training.save_ckpt_dtype),
        training.save_timeout_s,
        view_writer(parts.arguments.data.dataset_param, Path(model_folder), only_template=training.lora.enable),
        note=parts.record.note,
        write_beside=parts.write_beside,
    )


class CheckpointHook(Hook):
    """Saves every `interval` steps, after the last step, and when a stop is asked for.

    It stands before validation: what fails there, or is cut off by a scheduler's patience, finds the weights committed.

    Args:
        manager: Writes checkpoints.
        training: The `training` section.
        record: Where saves are told and written down.
        hugging_face: Writes a Hugging Face folder beside each of them, when asked for.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        training: TrainingArguments,
        record: RunRecord,
        hugging_face: HuggingFaceSaves | None = None,
    ) -> None:
        self._manager = manager
        self._hugging_face = hugging_face
        self._training = training
        self._record = record
        self._untold: tuple[int, float] | None = None
        """A save that was begun: its step, and the seconds that training stood still for it."""
        self.saved_step = 0
        """The step whose save was begun last."""

    def is_called_at_once(self, engine: TrainEngine, step: int) -> bool:
        """What is saved is the state after a step, and its line is in the log before."""
        interval = self._training.save_interval
        return (interval > 0 and step % interval == 0) or step == engine.last_step

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Save when it is time."""
        by_signal = engine.stopping and self._training.save_on_signal
        if self.is_called_at_once(engine, result.step) or by_signal:
            self._save(engine)

    def on_train_end(self, engine: TrainEngine) -> None:
        """Save where a hook has ended the run, and wait for a save that is under way: one that fails is a failed
        run."""
        if engine.stop_wanted:
            self.ensure_saved(engine)
        self.on_failure(engine)

    def on_failure(self, engine: TrainEngine) -> None:
        """Wait for a save that is under way."""
        with engine.phase("save", self._training.save_timeout_s):
            self._guarded(engine, self._manager.wait)
        self._tell()

    def ensure_saved(self, engine: TrainEngine) -> bool:
        """Save unless this step is saved; whether it is afterwards, or will be when the background has done it."""
        is_resumed = engine.iteration == engine.first_iteration  # from this very checkpoint
        if not is_resumed and self.saved_step != engine.iteration:
            self._save(engine)
        return is_resumed or self._manager.is_saved(engine.iteration)

    def _save(self, engine: TrainEngine) -> None:
        started = time.perf_counter()
        self.saved_step = engine.iteration
        state = engine.state()
        if not self._training.no_save_rng:
            state["rng"] = capture_rng()
        try:
            with engine.phase("save", self._training.save_timeout_s):
                self._guarded(
                    engine,
                    lambda: self._manager.save(
                        engine.iteration, engine.model, engine.optimizer, state, engine.ema, engine.critic
                    ),
                )
                if (saves := self._hugging_face) is not None:
                    self._guarded(engine, lambda: self._save_for_others(engine, saves))
        finally:
            self._tell()  # in the background the one before has ended by now, and its failure may be what was raised
            self._untold = (engine.iteration, time.perf_counter() - started)
        if not self._training.save_async:
            self._tell()

    def _save_for_others(self, engine: TrainEngine, saves: HuggingFaceSaves) -> None:
        """As `mm export` does: the moving average of the weights, where there is one."""
        weights: AbstractContextManager[object] = nullcontext()
        if engine.ema is not None and engine.ema.is_result:
            weights = engine.ema.applied()
        with weights:
            saves.save(engine.iteration, engine.model)

    def _tell(self) -> None:
        """Tell of the save that was begun last: only what is committed is one."""
        if self._untold is None:
            return
        (step, seconds), self._untold = self._untold, None
        if checkpoint_folder(self._manager.save_folder, step).is_dir():
            self._record.event("save", step, f"step {step}: checkpoint saved ({seconds:.1f} s)", seconds=seconds)

    def _guarded(self, engine: TrainEngine, action: Callable[[], object]) -> None:
        try:
            action()
        except MMError as error:
            if self._training.on_save_error == "stop":
                self._record.event("warning", engine.iteration, message=str(error))  # who catches it says it
                raise
            self._record.note(f"warning: {error}", engine.iteration)


# --- Hugging Face folders ---------------------------------------------------------------------------------------------


class HuggingFaceSaves:
    """Writes `<save>/hf/iter_0000123`; a folder whose checkpoint was deleted is deleted too. Resuming takes the
    checkpoints: they hold the optimizer. Every rank makes one, and calls `save` at the same moment.

    It is a whole model; of a run that trains adapters the adapters alone, of a generator the transformer alone.

    Args:
        save: The run folder.
        assets_from: What the run started from: configuration, tokenizer and processor are copied.
        family: Knows how a whole model is written.
        dtype: Of the weights; None: as `assets_from` has them.
        timeout_s: Limit on each exchange between ranks.
        write_view: Adds to the folder how training looked at its rows.
        note: Tells the user.
        write_beside: Makes another layout of a folder that was written.
    """

    def __init__(
        self,
        save: Path,
        assets_from: Path,
        family: Family,
        dtype: torch.dtype | None,
        timeout_s: float,
        write_view: Callable[[Path], None] | None,
        note: Callable[[str], None],
        write_beside: Callable[[Path], None] | None = None,
    ) -> None:
        self._save, self._assets_from, self._family, self._dtype = save, assets_from, family, dtype
        self._write_view, self._note, self._write_beside = write_view, note, write_beside
        self._ranks = Ranks(timeout_s)

    def save(self, iteration: int, model: nn.Module) -> None:
        """Write the folder of this step.

        Raises:
            MMError: It could not be written, on all ranks alike.
        """
        folder = self._folder / checkpoint_folder(self._save, iteration).name
        self._ranks.first("making room", lambda: self._keep_what_is_not_ours(folder))
        self._write(model, folder)
        if (write_beside := self._write_beside) is not None:
            self._ranks.first("writing another layout", lambda: write_beside(folder))
        self._ranks.first("deleting old folders", lambda: self._prune(keep=folder))

    def _write(self, model: nn.Module, folder: Path) -> None:
        if facts_of(model).lora is not None:
            save_adapters(
                model,
                folder,
                self._assets_from,
                dtype=self._dtype,
                overwrite=True,
                ranks=self._ranks,
                write_view=self._write_view,
            )
            return
        save = WholeSave(folder, self._assets_from, self._dtype, self._ranks, self._write_view)
        self._family.save_model(model, save)

    @property
    def _folder(self) -> Path:
        return self._save / "hf"

    def _prune(self, keep: Path) -> None:
        for folder in self._folder.glob("iter_*"):
            if folder != keep and not (self._save / folder.name).is_dir():
                remove_written(folder)

    def _keep_what_is_not_ours(self, folder: Path) -> None:
        """A folder that somebody has put into, or changed, does not end a run that saves under its name."""
        if folder.is_dir() and is_touched(folder):
            self._note(put_aside(folder, "with files that no save has written, or that were changed since"))
