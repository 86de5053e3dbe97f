"""What happens around steps: checkpoints, validation, bad samples, garbage collection."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import MMError
from mindspeed_mm.fsdp.checkpoint.layout import checkpoint_folder
from mindspeed_mm.fsdp.checkpoint.manager import CheckpointManager
from mindspeed_mm.fsdp.data.dataloader.dataloader import DataCounts, MMDataLoader
from mindspeed_mm.fsdp.params.training_args import TrainingArguments
from mindspeed_mm.fsdp.train.run.failures import shortened
from mindspeed_mm.fsdp.train.run.hf_saves import HuggingFaceSaves
from mindspeed_mm.fsdp.train.run.progress import Progress
from mindspeed_mm.fsdp.train.run.random_state import capture_rng
from mindspeed_mm.fsdp.train.run.record import RunRecord
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine


class ValidationHook(Hook):
    """Mean loss on held-out samples every `interval` steps: `val_loss` is the objective's own (of a language model the
    cross-entropy), each term beside it has a name of its own (`val_z_loss`, `val_router_aux`).

    Args:
        batches: Makes a pass over the validation set, the same each time.
        interval: Steps between two passes; a pass also follows the last step.
    """

    def __init__(
        self, batches: Callable[[], Iterable[list[Batch]]], interval: int, record: RunRecord, progress: Progress
    ) -> None:
        self._batches = batches
        self._interval = interval
        self._record = record
        self._progress = progress

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Validate when it is time."""
        is_last = result.step == engine.schedule.total_steps
        if (result.step % self._interval and not is_last) or (engine.stopping and not is_last):
            return
        losses = engine.evaluate(self._batches())
        terms = {f"val_{name}": value for name, value in losses.items()}
        metrics = {"step": result.step, **terms}
        self._record.metrics(metrics)
        engine.validated_step, engine.validation = result.step, terms
        self._record.event("validate", result.step, **losses)
        told = [f"{name} {value:.4f}" for name, value in losses.items()]
        self._progress.note(f"step {result.step}: validation {', '.join(told)}")


class CheckpointHook(Hook):
    """Saves every `interval` steps, after the last step, and when a stop is asked for.

    It stands before validation: what fails there, or is cut off by a scheduler's patience, finds the weights committed.

    Args:
        manager: Writes checkpoints.
        training: The `training` section.
        hugging_face: Writes a Hugging Face folder beside each of them, when asked for.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        training: TrainingArguments,
        record: RunRecord,
        progress: Progress,
        hugging_face: HuggingFaceSaves | None = None,
    ) -> None:
        self._manager = manager
        self._hugging_face = hugging_face
        self._training = training
        self._record = record
        self._progress = progress
        self._untold: tuple[int, float] | None = None
        """A save that was begun: its step, and the seconds that training stood still for it."""
        self._saved_step = 0

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Save when it is time."""
        interval = self._training.save_interval
        by_signal = engine.stopping and self._training.save_on_signal
        if (interval and result.step % interval == 0) or result.step == engine.last_step or by_signal:
            self._save(engine)

    def on_train_end(self, engine: TrainEngine) -> None:
        """Save where a hook has ended the run, and wait for a save that is under way: one that fails is a failed
        run."""
        if engine.stop_wanted and self._saved_step != engine.iteration:
            self._save(engine)
        self.on_failure(engine)

    def on_failure(self, engine: TrainEngine) -> None:
        """Wait for a save that is under way."""
        with engine.phase("save", self._training.save_timeout_s):
            self._guarded(engine, self._manager.wait)
        self._tell()

    def _save(self, engine: TrainEngine) -> None:
        started = time.perf_counter()
        self._saved_step = engine.iteration
        state = engine.state()
        if not self._training.no_save_rng:
            state["rng"] = capture_rng()
        try:
            with engine.phase("save", self._training.save_timeout_s):
                self._guarded(
                    engine,
                    lambda: self._manager.save(engine.iteration, engine.model, engine.optimizer, state, engine.ema),
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
        with engine.ema.applied() if engine.ema is not None else nullcontext():
            saves.save(engine.iteration, engine.model)

    def _tell(self) -> None:
        """Tell of the save that was begun last: only what is committed is one."""
        if self._untold is None:
            return
        (step, seconds), self._untold = self._untold, None
        if checkpoint_folder(self._manager.save_folder, step).is_dir():
            self._record.event("save", step, seconds=seconds)
            self._progress.note(f"step {step}: checkpoint saved ({seconds:.1f} s)")

    def _guarded(self, engine: TrainEngine, action: Callable[[], object]) -> None:
        try:
            action()
        except MMError as error:
            self._record.event("warning", engine.iteration, message=str(error))
            if self._training.on_save_error == "stop":
                raise
            self._progress.note(f"warning: {error}")


class DataHook(Hook):
    """Tells, at the end of each epoch and of the run, which samples could not be used as they stand.

    Args:
        loader: Counts on this rank; the counts of all ranks are told.
        group: Ranks that hold different samples; None for one process.
    """

    def __init__(
        self, loader: MMDataLoader, group: dist.ProcessGroup | None, record: RunRecord, progress: Progress
    ) -> None:
        self._loader, self._group = loader, group
        self._record, self._progress = record, progress
        self._epoch = loader.position.epoch

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Ranks tell each other of bad samples, so that all of them stop or none; people are told when an epoch is
        over."""
        if result.tally.bad_samples:
            found = {sample: reason for each in self._over_ranks() for sample, reason in each.bad.items()}
            self._loader.learn_bad_samples(found)
        if self._loader.position.epoch != self._epoch:
            self._epoch = self._loader.position.epoch
            self._tell(engine)

    def on_train_end(self, engine: TrainEngine) -> None:
        """Tell of the whole run."""
        self._tell(engine)

    def on_failure(self, engine: TrainEngine) -> None:
        """Nothing: the other ranks may not be there to ask."""

    def _tell(self, engine: TrainEngine) -> None:
        if (mix := self._loader.mix) is not None:
            shares = mix.achieved()
            self._record.event("mix", engine.iteration, shares=shares)
            self._progress.note("mix so far: " + ", ".join(f"{name} {share:.2%}" for name, share in shares.items()))
        counts = self._over_ranks()
        bad = {sample: reason for each in counts for sample, reason in each.bad.items()}
        shrunk, too_long = sum(each.shrunk for each in counts), sum(each.too_long for each in counts)
        if not (bad or shrunk or too_long):
            return
        self._record.event("data", engine.iteration, bad=bad, shrunk=shrunk, too_long=too_long)
        self._progress.note(
            f"data so far: {len(bad)} bad samples were replaced or left out, {too_long} too long ones too, "
            f"{shrunk} were shortened"
            + (f"; {shortened([f'{sample} ({reason})' for sample, reason in bad.items()], most=3)}" if bad else "")
        )

    def _over_ranks(self) -> list[DataCounts]:
        if self._group is None:
            return [self._loader.counts]
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, self._loader.counts, group=self._group)
        return gathered


class CallbackHook(Hook):
    """Calls a function after every step, validation and save included; when it returns True the run ends there.

    Args:
        function: Called with the step's result.
    """

    def __init__(self, function: Callable[[StepResult], object]) -> None:
        self._function = function

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Call it."""
        if engine.validated_step == result.step:
            result = replace(result, validation=engine.validation)
        if self._function(result) is True:
            engine.stop()


class GarbageCollectionHook(Hook):
    """Collects garbage at the same step on every rank, so that no rank pauses alone."""

    def __init__(self, interval: int) -> None:
        self._interval = interval

    def on_train_begin(self, engine: TrainEngine) -> None:
        """Take collection out of Python's hands."""
        gc.disable()
        gc.collect()

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Collect the young generation when it is time."""
        if result.step % self._interval == 0:
            gc.collect(1)

    def on_train_end(self, engine: TrainEngine) -> None:
        """Give it back."""
        gc.enable()
