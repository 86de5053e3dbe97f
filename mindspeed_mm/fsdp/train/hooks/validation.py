"""Validation while training: the mean loss on held-out samples, every so many steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.train.run.parts import RunParts
from mindspeed_mm.fsdp.train.run.record import RunRecord
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine


def validation_hook(parts: RunParts) -> ValidationHook | None:
    """The hook, where there are held-out samples and `training.val_interval` asks for it."""
    interval = parts.arguments.training.val_interval
    batches = parts.held_out() if interval > 0 else None
    return ValidationHook(batches, interval, parts.record) if batches is not None else None


class ValidationHook(Hook):
    """Mean loss on held-out samples every `interval` steps: `val_loss` is the objective's own (of a language model the
    cross-entropy), each term beside it has a name of its own (`val_z_loss`, `val_router_aux`).

    Args:
        batches: Makes a pass over the validation set, the same each time.
        interval: Steps between two passes; a pass also follows the last step.
        record: Where the losses are told and written down.
    """

    def __init__(self, batches: Callable[[], Iterable[list[Batch]]], interval: int, record: RunRecord) -> None:
        self._batches = batches
        self._interval = interval
        self._record = record

    def is_due(self, engine: TrainEngine, step: int) -> bool:
        """Whether a pass follows this step."""
        is_last = step == engine.schedule.total_steps
        return is_last or (step % self._interval == 0 and not engine.stopping)

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Validate when it is time."""
        if self.is_due(engine, result.step):
            self.measure(engine)

    def measure(self, engine: TrainEngine) -> None:
        """Make a pass, and tell."""
        losses, step = engine.validate(self._batches()), engine.iteration
        terms = {f"val_{name}": value for name, value in losses.items()}
        self._record.metrics({"step": step, **terms})
        engine.note_validation(terms)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in losses.items())
        self._record.event("validate", step, f"step {step}: validation {shown}", **losses)
