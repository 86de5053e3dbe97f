"""Steps of a whole run through the real trainer, recorded for comparison, with faults to plant."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp import FSDPModule

from mindspeed_mm.fsdp.distributed import torch_parallelize
from mindspeed_mm.fsdp.loss import objectives
from mindspeed_mm.fsdp.train import train_engine
from mindspeed_mm.fsdp.train.forward_backward import PlainForwardBackward
from mindspeed_mm.fsdp.train.tally import Tally
from mindspeed_mm.fsdp.train.trainer import Trainer
from mindspeed_mm.tasks.train import load_with_plugins
from tests.helpers.parity import StepRecord, record_step, record_weights

GLOBAL_BATCH = 8


def train_steps(yaml: str, overrides: list[str], fault: str | None = None) -> list[StepRecord]:
    """Two optimizer steps on this rank through the real trainer, recorded."""
    steps: list[StepRecord] = []

    class Watched(Trainer):
        def _build_engine(self, *args: Any, **kwargs: Any) -> Any:
            engine = super()._build_engine(*args, **kwargs)
            update, train_step = engine._update, engine.train_step

            def watched_update(norm: torch.Tensor) -> None:
                steps.append(record_step(engine.model, torch.zeros(()), norm))
                update(norm)

            def watched_step(*args: Any, **kwargs: Any) -> Any:
                result = train_step(*args, **kwargs)
                loss = torch.tensor(result.loss, dtype=torch.float64)
                steps[-1] |= {"loss": loss, "weights": record_weights(engine.model)}
                return result

            engine._update, engine.train_step = watched_update, watched_step
            if fault == "dropped all-reduce":
                drop_all_reduce(engine.model)
            return engine

        def _build_hooks(self, *args: Any, **kwargs: Any) -> Any:
            return []

    with planted(fault):
        Watched(load_with_plugins(Path(yaml), overrides)).train()
    return steps


def drop_all_reduce(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_all_reduce(False, recurse=False)


def planted(fault: str | None) -> Any:
    """The fault as a patch of the one function that it would be a bug in."""
    if fault == "rank's own denominator":
        return mock.patch.object(Tally, "summed_over", lambda self, *ranks: self)
    if fault == "gradients averaged over ranks":
        return mock.patch.object(torch_parallelize, "sum_gradients", lambda model: None)
    if fault == "averaged over micro-batches":
        plain = PlainForwardBackward.__call__

        def averaged(self: Any, micro_batches: Any, denominators: Any) -> Any:
            return plain(self, micro_batches, {k: v * len(micro_batches) for k, v in denominators.items()})

        return mock.patch.object(PlainForwardBackward, "__call__", averaged)
    if fault == "norm of the local shard":
        return mock.patch.object(train_engine, "grad_norm", local_norm)
    if fault == "mask off by one":
        real = objectives.labelled_rows
        return mock.patch.object(objectives, "labelled_rows", lambda labels: real(labels)[1:])
    return nullcontext()


def local_norm(parameters: Any) -> torch.Tensor:
    return torch.stack([p.grad.to_local().norm() for p in parameters if p.grad is not None]).norm()


def overrides(ranks: int, accumulation: int, *more: str) -> list[str]:
    micro = GLOBAL_BATCH // ranks // accumulation
    return [f"training.micro_batch_size={micro}", f"training.gradient_accumulation_steps={accumulation}", *more]
