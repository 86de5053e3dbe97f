"""Steps of a whole run through the real trainer, recorded for comparison, with faults to plant."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from mindspeed_mm.fsdp.loss import objectives
from mindspeed_mm.fsdp.train import trainer as trainers
from mindspeed_mm.fsdp.train.assemble import Assembled, assemble
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.hooks.step_record import StepRecord, StepRecorder
from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
from mindspeed_mm.fsdp.train.trainer import Trainer
from mindspeed_mm.tasks.verify import faults
from tests.helpers.applied_plan import check_applied
from tests.helpers.threads import collect_when_many

GLOBAL_BATCH = 8
FAULTS = {
    "dropped all-reduce": "dropped-all-reduce",
    "rank's own denominator": "wrong-divisor",
    "gradients averaged over ranks": "averaged-gradients",
    "averaged over micro-batches": "averaged-micro-batches",
    "norm of the local shard": "local-clip-norm",
}
"""Our words → the faults that `mm verify --inject` knows."""


class Quiet(Trainer):
    """Logs and saves nothing."""

    def _build_hooks(self, *args: Any, **kwargs: Any) -> Any:
        return []


def train_steps(
    yaml: str, overrides: list[str], fault: str | None = None, *, packs: bool | None = None
) -> list[StepRecord]:
    """Two optimizer steps on this rank through the real trainer, recorded. `packs`: all samples of a micro-batch in one
    row, or each in its own; None: as configured. What is done to the model is what its plan says."""
    recorder = StepRecorder()
    with planted(fault), mock.patch.object(trainers, "assemble", _assemble_and_compare):
        Quiet(load_with_plugins(Path(yaml), overrides), TrainOptions(packs=packs), hooks=[recorder]).train()
    collect_when_many()
    return recorder.steps


def _assemble_and_compare(*args: Any, **kwargs: Any) -> Assembled:
    assembled = assemble(*args, **kwargs)
    check_applied(assembled)
    return assembled


def planted(fault: str | None) -> Any:
    """The fault, where it is planted with a function of ours or of `mm verify`."""
    if fault is None:
        return nullcontext()
    if fault == "mask off by one":
        real = objectives.labelled_rows
        return mock.patch.object(objectives, "labelled_rows", lambda labels: real(labels)[1:])
    return faults.planted(FAULTS.get(fault, fault))


def overrides(ranks: int, accumulation: int, *more: str) -> list[str]:
    micro = GLOBAL_BATCH // ranks // accumulation
    return [f"training.micro_batch_size={micro}", f"training.gradient_accumulation_steps={accumulation}", *more]
