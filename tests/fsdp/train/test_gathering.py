"""When parameters are gathered changes nothing of what is computed: `pregather`, `hook_modules`, prefetching."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from mindspeed_mm.fsdp.distributed.sharding.fully_shard import gathered_before
from mindspeed_mm.fsdp.distributed.sharding.plan import ShardingWishes, resolve_sharding
from mindspeed_mm.fsdp.params.parallel_args import FsdpPlan
from mindspeed_mm.fsdp.params.sizes.parallel import ParallelSizes
from mindspeed_mm.fsdp.train import build_engine
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import compare_steps
from tests.helpers.plan_matrix import EP, FP64
from tests.helpers.planned_steps import overrides, train_steps
from tests.helpers.tiny_models import make_tiny_qwen3_moe
from tests.helpers.tiny_run import make_rows, make_tiny_run

TOLERANCE = 1e-10
PREGATHER = "parallel.fsdp_plan.pregather=true"
HOOKED = "parallel.fsdp_plan.hook_modules=['model.layers.{*}']"
PREFETCH = ("parallel.fsdp_plan.num_to_forward_prefetch=1", "parallel.fsdp_plan.num_to_backward_prefetch=1")
IN_ORDER = "data.dataloader_param.shuffle=false"


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Three steps, of which the second has no image anywhere, and a model with experts."""
    folder = tmp_path_factory.mktemp("gathering")
    fp64 = FP64 | {"training": FP64["training"] | {"train_iters": 3}}
    make_rows(folder / "vlm", images=(1, 0, 2, 1, 0, 1, 1, 1, *(0,) * 8, 1, 0, 2, 1, 1, 0, 1, 1))
    make_tiny_qwen3_moe(folder / "moe" / "model", initializer_range=0.3, num_hidden_layers=3)
    make_rows(folder / "moe", images=(0,))
    return {name: str(make_tiny_run(folder / name, **fp64)) for name in ("vlm", "moe")}


def steps(yaml: str, words: list[str]) -> Any:
    with keeping_double():
        return train_steps(yaml, words)


@pytest.fixture(scope="module")
def alone(yamls: dict[str, str]) -> dict[str, Any]:
    return {name: steps(yaml, overrides(1, 2, IN_ORDER)) for name, yaml in yamls.items()}


def test_parameters_gathered_before_the_step(yamls: dict[str, str], alone: dict[str, Any]) -> None:
    for measured in run_ranks(2, steps, yamls["vlm"], overrides(2, 2, IN_ORDER, PREGATHER)):
        compare_steps(alone["vlm"], measured, TOLERANCE)


def test_each_step_begins_with_it(yamls: dict[str, str]) -> None:
    seen: list[nn.Module] = []

    def note(model: nn.Module) -> Any:
        seen.append(model)
        return nullcontext()

    with mock.patch.object(build_engine, "gathered_before", note):
        steps(yamls["vlm"], overrides(1, 2, IN_ORDER))
        assert seen == []
        steps(yamls["vlm"], overrides(1, 2, IN_ORDER, PREGATHER))
    assert len(seen) == 3  # once a step, not once a micro-batch


class Block(nn.Module):
    """Runs one of its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def gather_and_run() -> dict[str, Any]:
    """Which parameters are whole inside, and after."""
    model = Block()
    for module in (model.used, model.idle, model):
        fully_shard(module)
    counts: list[int] = []
    with gathered_before(model):
        with CommDebugMode() as traffic:
            model(torch.ones(2, 8)).sum().backward()
        counts.append(traffic.get_total_counts())
    whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    return {"collectives inside": counts[0], "whole after": whole}


def test_all_is_gathered_before_and_let_go_of_after() -> None:
    found = run_ranks(2, gather_and_run)[0]
    assert found["collectives inside"] == 2  # gathered for the backward pass, gradients summed: none in the forward
    assert found["whole after"] == []


@pytest.mark.slow
@pytest.mark.parametrize("words", [(HOOKED,), (HOOKED, *PREFETCH), (HOOKED, *PREFETCH, PREGATHER), PREFETCH])
def test_experts_gathered_with_their_blocks(yamls: dict[str, str], alone: dict[str, Any], words: tuple[str]) -> None:
    for measured in run_ranks(4, steps, yamls["moe"], overrides(4, 1, IN_ORDER, EP, *words)):
        compare_steps(alone["moe"], measured, TOLERANCE)


def test_hooks_of_what_holds_nothing_wrapped_are_told() -> None:
    model = nn.Sequential(Block(), Block())
    section = FsdpPlan(apply_modules=("0", "1"), hook_modules=("0",))
    plan, told = resolve_sharding(model, section, ParallelSizes(2, 1, 1, 2, 1, 1, 1, 1, 2, 1), ShardingWishes())
    assert plan.hooked == ()
    assert any("hook_modules has no effect" in line for line in told)
