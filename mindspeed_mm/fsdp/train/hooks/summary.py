"""What a run says of itself after its last step: losses, time, where it lies, the next command."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable
from pathlib import Path

from typing_extensions import override

from mindspeed_mm.checkpoint.choice import best_of
from mindspeed_mm.checkpoint.layout import list_iterations
from mindspeed_mm.fsdp.train.run.parts import RunParts
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine
from mindspeed_mm.fsdp.utils.work_progress import clock


def summary_hook(parts: RunParts) -> Hook:
    """The hook, which every run has."""
    folder = parts.arguments.model.model_name_or_path
    options = parts.family.trial_options(parts.assembled.model) if folder and _answers(Path(folder)) else None
    return SummaryHook(parts.record.progress.note, parts.arguments.training.save, options)


def _answers(folder: Path) -> bool:
    """Whether a model's folder has what a question is read by, or draws: an own module's has neither."""
    return (folder / "model_index.json").is_file() or any(folder.glob("token*")) or any(folder.glob("*processor*"))


class SummaryHook(Hook):
    """Keeps the lowest and the last loss of this start, and tells them when training ends.

    Args:
        note: Tells people.
        save: The run folder.
        trial_options: Options of `mm infer` that try the trained model; None where it cannot be tried so.
    """

    def __init__(self, note: Callable[[str], None], save: str | None, trial_options: str | None) -> None:
        self._note, self._save, self._trial_options = note, save, trial_options
        self._last = self._lowest = self._last_validation = self._lowest_validation = (0, math.inf)
        self._began = time.monotonic()

    @override
    def on_train_begin(self, engine: TrainEngine) -> None:
        self._began = time.monotonic()

    @override
    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        self._last = (result.step, result.loss)
        self._lowest = min(self._lowest, self._last, key=lambda pair: pair[1])
        if engine.validated_step == result.step and "val_loss" in engine.validation:
            self._last_validation = (result.step, engine.validation["val_loss"])
            self._lowest_validation = min(self._lowest_validation, self._last_validation, key=lambda pair: pair[1])

    def on_train_end(self, engine: TrainEngine) -> None:
        """Tell how it went; nothing where no step was done."""
        if not self._last[0]:
            return
        took = clock(time.monotonic() - self._began)
        self._note(f"done   step {engine.iteration} of {engine.schedule.total_steps}, {took} for this start")
        self._note(f"loss   {_described(self._last, self._lowest)}")
        if self._last_validation[0]:
            self._note(f"valid  {_described(self._last_validation, self._lowest_validation)}")
        if self._save is None:
            self._note("run    nothing was saved: training.save is not set")
            return
        steps = list_iterations(Path(self._save))
        if not steps:
            self._note(f"run    {self._save}, no checkpoint")
            return
        best = best_of(Path(self._save))
        told = f"newest checkpoint {steps[-1]}"
        if best is not None and best[0] != steps[-1]:
            told += f"; mm infer and mm export use the best, step {best[0]} ({best[1]}): --checkpoint newest"
        self._note(f"run    {self._save}, {told}")
        run = shlex.quote(self._save)
        trial = f"mm infer {run} {self._trial_options}; mm export {run} FOLDER; " if self._trial_options else ""
        self._note(f"next   {trial}mm report {run}")

    def on_failure(self, engine: TrainEngine) -> None:
        """Nothing: the error says what to do."""


def _described(last: tuple[int, float], lowest: tuple[int, float]) -> str:
    """`final 0.1234, lowest 0.1200 at step 380`; no lowest where no loss was finite."""
    told = f"final {last[1]:.4f}"
    if lowest[0] and lowest != last:
        told += f", lowest {lowest[1]:.4f} at step {lowest[0]}"
    return told
