"""Any plan and any split of a batch equals one process, in fp64: loss, every gradient, clip norm, weights after steps.

The runs are whole: the configuration goes through the trainer, on uneven answers and uneven image counts. Each planted
fault goes through the same comparison and must fail it.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from mindspeed_mm.fsdp.distributed import torch_parallelize
from mindspeed_mm.fsdp.loss import objectives
from mindspeed_mm.fsdp.train import train_engine
from mindspeed_mm.fsdp.train.forward_backward import PlainForwardBackward
from mindspeed_mm.fsdp.train.tally import Tally
from mindspeed_mm.fsdp.train.trainer import Trainer
from mindspeed_mm.tasks.train import load_with_plugins
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import ParityError, StepRecord, compare_steps, record_step, record_weights
from tests.helpers.tiny_run import make_tiny_run

GLOBAL_BATCH = 8
TOLERANCE = 1e-10


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
        return mock.patch.object(Tally, "summed_over", lambda self, group: self)
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


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(
        make_tiny_run(
            tmp_path_factory.mktemp("parity"),
            parallel={"fsdp_plan": {"param_dtype": "fp64"}},
            training={"train_iters": 2, "clip_grad": 0.5, "weight_decay": 0.1, "adam_fused": False},
        )
    )


def overrides(ranks: int, accumulation: int, *more: str) -> list[str]:
    micro = GLOBAL_BATCH // ranks // accumulation
    return [f"training.micro_batch_size={micro}", f"training.gradient_accumulation_steps={accumulation}", *more]


PLANS = {
    "accumulation 2": (1, 2, ()),
    "accumulation 4": (1, 4, ()),
    "fsdp 2": (2, 1, ()),
    "fsdp 2, accumulation 2": (2, 2, ()),
    "fsdp 4, accumulation 2": (4, 2, ()),
    "zero-2": (2, 2, ("parallel.fsdp_plan.reshard_after_forward=false",)),
    "hsdp 2x2": (4, 1, ("parallel.fully_shard_parallel_size=2",)),
    "replicated 2": (2, 2, ("parallel.fully_shard_parallel_size=1",)),
}

FAULTS = {
    "rank's own denominator": "fsdp 2",
    "gradients averaged over ranks": "fsdp 4, accumulation 2",
    "dropped all-reduce": "hsdp 2x2",
    "averaged over micro-batches": "accumulation 2",
    "norm of the local shard": "zero-2",
    "mask off by one": "replicated 2",
}


@pytest.fixture(scope="module")
def reference(yaml: str) -> list[StepRecord]:
    return run_ranks(1, train_steps, yaml, overrides(1, 1))[0]


@cache
def results_of(ranks: int, yaml: str) -> list[dict[str, list[StepRecord]]]:
    """Every plan and fault that takes this many ranks, by rank, in one start of the processes."""
    return run_ranks(ranks, run_cases, ranks, yaml, timeout_s=240)


def run_cases(ranks: int, yaml: str) -> dict[str, list[StepRecord]]:
    cases = {plan: (plan, None) for plan in PLANS} | {fault: (plan, fault) for fault, plan in FAULTS.items()}
    mine = {name: case for name, case in cases.items() if PLANS[case[0]][0] == ranks}
    return {
        name: train_steps(yaml, overrides(ranks, PLANS[plan][1], *PLANS[plan][2]), fault)
        for name, (plan, fault) in mine.items()
    }


@pytest.mark.parametrize("plan", PLANS)
def test_plan_equals_one_process(plan: str, yaml: str, reference: list[StepRecord]) -> None:
    for measured in results_of(PLANS[plan][0], yaml):
        compare_steps(reference, measured[plan], TOLERANCE)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault: str, yaml: str, reference: list[StepRecord]) -> None:
    with pytest.raises(ParityError):
        compare_steps(reference, results_of(PLANS[FAULTS[fault]][0], yaml)[0][fault], TOLERANCE)
