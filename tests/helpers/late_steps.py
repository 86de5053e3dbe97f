"""Runs on a CPU as on an accelerator: the device decides on updates, and numbers are read one step late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from mindspeed_mm.fsdp.train import trainer
from mindspeed_mm.fsdp.train.build_engine import why_steps_wait
from mindspeed_mm.fsdp.train.train_engine import TrainEngine


@contextmanager
def late_steps() -> Iterator[None]:
    """While inside, engines are late where an accelerator would let them."""
    real = trainer.build_engine

    def build(arguments: Any, job: Any, assembled: Any, objective: Any, optimizer: Any, ema: Any, *more: Any) -> Any:
        engine: TrainEngine = real(arguments, job, assembled, objective, optimizer, ema, *more)
        engine.late = not why_steps_wait(
            arguments.parallel, arguments.training, arguments.posttrain, optimizer, ema, engine.device
        )
        return engine

    with mock.patch.object(trainer, "build_engine", build):
        yield
