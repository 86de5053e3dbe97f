"""Training with what a caller in Python gives: rows in memory, a model object, functions."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from mindspeed_mm.core.errors import UsageError, told_as
from mindspeed_mm.core.garbage import collecting_later
from mindspeed_mm.core.request import short
from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
from mindspeed_mm.fsdp.train.train_engine import Hook
from mindspeed_mm.fsdp.train.trainer import Trainer
from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision
from mindspeed_mm.tasks.given.arguments import named_by
from mindspeed_mm.tasks.given.configuration import GivenConfig, resolved
from mindspeed_mm.tasks.given.objects import with_objects
from mindspeed_mm.tasks.given.run_view import RecordsInMemory, Run, run_of

if TYPE_CHECKING:
    from mindspeed_mm.tasks.given.objects import Processor


def train_given(
    config: GivenConfig,
    rows: object,
    val_rows: object,
    processor: Processor | None,
    callbacks: object,
    options: TrainOptions,
) -> Run:
    """Train in this process; arguments as of `mm.train`, `options` as for `mm train`."""
    ensure_torchvision()  # before callbacks and data sets of the caller import transformers
    hooks = _listed(callbacks)
    with ExitStack() as stack, collecting_later(), told_as(named_by(rows=rows, val_rows=val_rows)):
        words, objects = with_objects(
            config.source, list(config.overrides), config.model, (rows, val_rows), processor, stack
        )
        kept = RecordsInMemory()
        trainer = Trainer(resolved(config.source, words), options, hooks, given=objects, trackers=[kept])
        engine = trainer.train()
    save = trainer.arguments.training.save
    if engine is None:  # no step was left to do
        return run_of(save, kept.records, None)
    return run_of(save, kept.records, engine.model)


def _listed(callbacks: object) -> list[Any]:
    """Functions and hooks; one alone may be given without a list."""
    listed = [callbacks]
    if isinstance(callbacks, list | tuple):
        listed = list(callbacks)
    for one in listed:
        if not (isinstance(one, Hook) or callable(one)):
            raise UsageError(
                f"{short(one)} cannot be called",
                key="callbacks",
                way_out="Give functions of a step's result, or mm.Hook.",
            )
    return listed
