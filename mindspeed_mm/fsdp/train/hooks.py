"""What happens around steps: the log line and metrics, validation, checkpoints, garbage collection."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from typing import Any

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import CheckpointError
from mindspeed_mm.fsdp.checkpoint.manager import CheckpointManager
from mindspeed_mm.fsdp.train.progress import Progress
from mindspeed_mm.fsdp.train.random_state import capture_rng
from mindspeed_mm.fsdp.train.run_record import RunRecord
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine
from mindspeed_mm.fsdp.utils.device import peak_memory_bytes

GIB = 2**30


class LogHook(Hook):
    """Adds up steps and, every `log_interval`, tells people and machines how it goes.

    Args:
        record: Where `metrics.jsonl` is written.
        progress: The lines and the bar that people see, and the log file.
        log_interval: Steps between two lines.
    """

    def __init__(self, record: RunRecord, progress: Progress, log_interval: int) -> None:
        self._record = record
        self._progress = progress
        self._interval = log_interval
        self._window: list[StepResult] = []

    def on_train_begin(self, engine: TrainEngine) -> None:
        """Start the clock of the time left."""
        self._begun, self._first_step = time.perf_counter(), engine.iteration

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Log the window of steps since the last line."""
        self._window.append(result)
        last = result.step == engine.last_step or engine.stopping
        if result.step % self._interval and not last and result.step != self._first_step + 1:
            return
        metrics = self._summary(engine, result)
        self._window.clear()
        self._record.metrics(metrics)
        self._progress.step(metrics, engine.schedule.total_steps)
        if result.skipped:
            self._record.event("warning", result.step, message="the step was not finite and was skipped")

    def on_train_end(self, engine: TrainEngine) -> None:
        """Close the bar and the files."""
        self._progress.close()

    def _summary(self, engine: TrainEngine, result: StepResult) -> dict[str, Any]:
        seconds = sum(r.seconds for r in self._window)
        tokens = sum(r.tally.tokens for r in self._window)
        samples = sum(r.tally.samples for r in self._window)
        done = result.step - self._first_step
        pace = (time.perf_counter() - self._begun) / done
        terms = {f"loss/{name}": value for name, value in result.losses.items()} if len(result.losses) > 1 else {}
        return {
            "step": result.step,
            "loss": result.loss,
            **terms,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens_per_s": tokens / seconds,
            "samples_per_s": samples / seconds,
            "step_ms": 1000 * seconds / len(self._window),
            "data_share": sum(r.data_seconds for r in self._window) / seconds,
            "memory_gib": peak_memory_bytes() / GIB,
            "tokens": tokens,
            "label_tokens": sum(r.tally.label_tokens for r in self._window),
            "consumed_samples": engine.consumed_samples,
            "eta_s": pace * (engine.schedule.total_steps - result.step),
        }


class ValidationHook(Hook):
    """Mean loss on held-out samples every `interval` steps.

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
        if result.step % self._interval and result.step != engine.schedule.total_steps:
            return
        losses = engine.evaluate(self._batches())
        total = sum(losses.values())
        self._record.metrics({"step": result.step, "val_loss": total})
        self._record.event("validate", result.step, loss=total)
        self._progress.note(f"step {result.step}: validation loss {total:.4f}")


class CheckpointHook(Hook):
    """Saves every `interval` steps, after the last step, and when a stop is asked for.

    Args:
        manager: Writes checkpoints.
        interval: Steps between two saves.
        on_error: `stop` raises what went wrong, `continue` notes it and trains on.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        interval: int,
        record: RunRecord,
        progress: Progress,
        *,
        on_error: str = "stop",
        save_on_signal: bool = True,
        with_rng: bool = True,
    ) -> None:
        self._manager = manager
        self._interval = interval
        self._record = record
        self._progress = progress
        self._on_error = on_error
        self._save_on_signal = save_on_signal
        self._with_rng = with_rng

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Save when it is time."""
        stop_now = engine.stopping and self._save_on_signal
        if result.step % self._interval == 0 or result.step == engine.last_step or stop_now:
            self._save(engine)

    def on_train_end(self, engine: TrainEngine) -> None:
        """Wait for a save that is under way: one that fails is a failed run."""
        self._guarded(engine, self._manager.wait)

    def _save(self, engine: TrainEngine) -> None:
        started = time.perf_counter()
        state = engine.state()
        if self._with_rng:
            state["rng"] = capture_rng()
        if self._guarded(engine, lambda: self._manager.save(engine.iteration, engine.model, engine.optimizer, state)):
            self._record.event("save", engine.iteration, seconds=time.perf_counter() - started)

    def _guarded(self, engine: TrainEngine, action: Callable[[], object]) -> bool:
        try:
            action()
        except CheckpointError as error:
            self._record.event("warning", engine.iteration, message=str(error))
            if self._on_error == "stop":
                raise
            self._progress.note(f"warning: {error}")
            return False
        return True


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
