"""Every sharding plan trains like one plain process: loss, gradients, norm and weights, uneven masks and images, fp64.

Each planted fault passes through the same assertion and must fail it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_mm.fsdp.distributed.sharding.fully_shard import fsdp_modules, set_gradient_sync
from tests.fsdp.distributed.training_step import IMAGES, SAMPLES, Variant, reference_steps, train_steps
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import ParityError, StepRecord, compare_steps

TOLERANCE = 1e-10
NO_IMAGES = (0,) * SAMPLES
ZERO3: dict[str, Any] = {}
ZERO2: dict[str, Any] = {"fsdp_plan": {"reshard_after_forward": False}}
PREFETCH: dict[str, Any] = {
    "fsdp_plan": {
        "apply_modules": ["model.language_model.layers.{*}", "model.visual.blocks.{*}", "*.merger"],
        "num_to_forward_prefetch": 2,
        "num_to_backward_prefetch": 2,
    }
}
WRAPPED: dict[str, Any] = {"fsdp_plan": {"param_dtype": "fp64"}}
"""Without a precision, one process is left as it is."""
OFFLOAD: dict[str, Any] = {"fsdp_plan": {"cpu_offload": True, "pin_memory": True}}
IGNORED: dict[str, Any] = {"fsdp_plan": {"ignored_modules": ["model.visual.merger"]}}
REPLICATED: dict[str, Any] = {"fully_shard_parallel_size": 1}
HYBRID: dict[str, Any] = {"fully_shard_parallel_size": 2}
REGROUPED: dict[str, Any] = {"fsdp_plan": {"reshard_after_forward": 2}}

# name → (ranks, plan, accumulation, images, steps)
PLANS: dict[str, tuple[int, dict[str, Any], int, tuple[int, ...], int]] = {
    "zero3": (2, ZERO3, 1, IMAGES, 2),
    "zero3, accumulation 4": (2, ZERO3, 4, IMAGES, 1),
    "zero3, no image anywhere": (2, ZERO3, 1, NO_IMAGES, 1),
    "zero2, accumulation 2": (2, ZERO2, 2, IMAGES, 2),
    "patterns and prefetch": (2, PREFETCH, 1, IMAGES, 1),
    "offload": (2, OFFLOAD, 1, IMAGES, 1),
    "ignored modules": (2, IGNORED, 2, IMAGES, 1),
    "replicated": (2, REPLICATED, 1, IMAGES, 1),
    "replicated, accumulation 4": (2, REPLICATED, 4, IMAGES, 1),
    "zero3 on 4": (4, ZERO3, 2, IMAGES, 1),
    "hybrid 2x2": (4, HYBRID, 1, IMAGES, 2),
    "hybrid 2x2, accumulation 2": (4, HYBRID, 2, IMAGES, 1),
    "resharded to 2 of 4": (4, REGROUPED, 1, IMAGES, 1),
}


IN_SHORT = {
    "zero3, no image anywhere",
    "patterns and prefetch",
    "offload",
    "ignored modules",
    "replicated, accumulation 4",
    "resharded to 2 of 4",
    *("last micro-batch not reduced, replicated", "norm counts copies"),
}
"""Plans and faults of the default run; `tests/fsdp/train/test_parity.py` has the others there, through the trainer."""


def marked(names: Iterable[str]) -> list[Any]:
    return [name if name in IN_SHORT else pytest.param(name, marks=pytest.mark.slow) for name in names]


def average_instead_of_sum(model: nn.Module) -> None:
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(float(dist.get_world_size()))


def drop_last_micro_batch(model: nn.Module, index: int, last: int) -> None:
    set_gradient_sync(model, index == 0)


def norm_of_own_shards(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    local = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm(local)


def norm_with_copies(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    squares = norm_of_own_shards(parameters).square()
    dist.all_reduce(squares)
    return squares.sqrt()


# name → (ranks, plan, accumulation, variant)
FAULTS: dict[str, tuple[int, dict[str, Any], int, Variant]] = {
    "mean instead of sum": (2, ZERO3, 1, Variant(after_sharding=average_instead_of_sum)),
    "last micro-batch not reduced, replicated": (2, REPLICATED, 2, Variant(set_sync=drop_last_micro_batch)),
    "each rank its own denominator": (2, ZERO3, 1, Variant(divisor=lambda _, here: here * dist.get_world_size())),
    "norm of own shards": (2, ZERO3, 1, Variant(norm=norm_of_own_shards)),
    "norm counts copies": (2, REPLICATED, 1, Variant(norm=norm_with_copies)),
}


def run_on_ranks(folder: str, in_short: bool) -> dict[str, list[StepRecord]]:
    here = dist.get_world_size()
    plans = {
        name: train_steps(folder, plan, accumulation, images=images, steps=steps)
        for name, (ranks, plan, accumulation, images, steps) in PLANS.items()
        if ranks == here and (name in IN_SHORT) == in_short
    }
    faults = {
        name: train_steps(folder, plan, accumulation, variant=variant)
        for name, (ranks, plan, accumulation, variant) in FAULTS.items()
        if ranks == here and (name in IN_SHORT) == in_short
    }
    return plans | faults


def run_alone(folder: str) -> dict[str, list[StepRecord]]:
    """Eight micro-batches, the last without an image: the tower's gradients wait for a pass that does not run it."""
    return {
        "two": train_steps(folder, WRAPPED, 2, steps=2),
        "eight": train_steps(folder, {"fsdp_plan": {**WRAPPED["fsdp_plan"], **ZERO2["fsdp_plan"]}}, 8),
    }


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> Callable[[tuple[int, ...], int], list[StepRecord]]:
    made = {images: reference_steps(str(tiny_folder), images=images, steps=2) for images in (IMAGES, NO_IMAGES)}
    return lambda images, steps: made[images][:steps]


@cache
def measured(ranks: int, folder: str, in_short: bool) -> list[dict[str, list[StepRecord]]]:
    """Records by rank."""
    return run_ranks(ranks, run_on_ranks, folder, in_short)


@pytest.mark.parametrize("name", marked(PLANS))
def test_plan_equals_one_process(name, tiny_folder, reference):
    ranks, _, _, images, steps = PLANS[name]
    on_ranks = [found[name] for found in measured(ranks, str(tiny_folder), name in IN_SHORT)]
    for on_rank in on_ranks:
        compare_steps(reference(images, steps), on_rank, TOLERANCE)
    for one, other in itertools.pairwise(on_ranks):
        compare_steps(one, other, 0.0)


@pytest.mark.parametrize("name", marked(FAULTS))
def test_planted_fault_is_seen(name, tiny_folder, reference):
    with pytest.raises(ParityError):
        for on_rank in measured(FAULTS[name][0], str(tiny_folder), name in IN_SHORT):
            compare_steps(reference(IMAGES, 1), on_rank[name], TOLERANCE)


def test_one_process_is_bitwise_plain(tiny_folder):
    (alone,) = run_ranks(1, run_alone, str(tiny_folder))
    compare_steps(reference_steps(str(tiny_folder), 2, steps=2), alone["two"], 0.0)
    compare_steps(reference_steps(str(tiny_folder), 8), alone["eight"], 0.0)
