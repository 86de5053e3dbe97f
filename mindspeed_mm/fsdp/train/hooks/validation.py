"""Validation while training: the mean loss on held-out samples, every so many steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.train.run.parts import RunParts
from mindspeed_mm.fsdp.train.run.record import RunRecord
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine


def validation_hook(parts: RunParts) -> Hook | None:
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

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Validate when it is time."""
        is_last = result.step == engine.schedule.total_steps
        if (result.step % self._interval and not is_last) or (engine.stopping and not is_last):
            return
        losses = engine.evaluate(self._batches())
        terms = {f"val_{name}": value for name, value in losses.items()}
        self._record.metrics({"step": result.step, **terms})
        engine.validated_step, engine.validation = result.step, terms
        shown = ", ".join(f"{name} {value:.4f}" for name, value in losses.items())
        self._record.event("validate", result.step, f"step {result.step}: validation {shown}", **losses)
