"""Garbage collection at chosen steps."""

from __future__ import annotations

import gc

from mindspeed_mm.fsdp.train.run.parts import RunParts
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine


def garbage_hook(parts: RunParts) -> Hook | None:
    """The hook, where `training.manual_gc_interval` asks for it."""
    interval = parts.arguments.training.manual_gc_interval
    return GarbageCollectionHook(interval) if interval > 0 else None


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
        """Turn Python's own garbage collection on again."""
        gc.enable()
