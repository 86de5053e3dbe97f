"""AdamW on the shards: torch's own numbers, without what torch does to place whole lists of sharded tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from mindspeed_mm.fsdp.optimizer.adamw import ShardedAdamW
from mindspeed_mm.fsdp.optimizer.build import build_optimizer, kind_of
from mindspeed_mm.fsdp.params.training_args import TrainingArguments
from tests.helpers.distributed import run_ranks

STEPS = 3


def python_calls(work: Callable[[], Any]) -> int:
    count = 0

    def seen(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def update(sharded: bool, fused: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], int, bool, str]:
    """Weights, states, Python calls of the first step, whether the states are sharded, and the optimizer's kind."""
    mesh = init_device_mesh("cpu", (2,))
    drawn = torch.Generator().manual_seed(0)
    place = lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]) if sharded else tensor  # noqa: E731
    model = torch.nn.ParameterList(torch.nn.Parameter(place(torch.randn(n, 4, generator=drawn))) for n in range(1, 31))
    settings = TrainingArguments.model_validate({"lr": 0.01, "weight_decay": 0.1, "adam_fused": fused})
    optimizer = build_optimizer(model, settings, note=print)
    calls = []
    for _ in range(STEPS):
        for parameter in model:
            parameter.grad = place(torch.randn(parameter.shape, generator=drawn))
        calls.append(python_calls(optimizer.step))
    states = [optimizer.state[parameter]["exp_avg_sq"] for parameter in model]
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in (*(p.detach() for p in model), *states)]
    return whole[:30], whole[30:], calls[0], all(isinstance(s, DTensor) for s in states), kind_of(optimizer)


@pytest.mark.edge("D4")
@pytest.mark.parametrize("fused", [True, False])
def test_shards_get_the_numbers_of_whole_tensors_in_few_calls(fused: bool) -> None:
    plain = run_ranks(2, update, False, fused)[0]
    sharded = run_ranks(2, update, True, fused)[0]
    for one, other in zip(plain[0] + plain[1], sharded[0] + sharded[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)  # the last numbers of a shard are not vectors'
    assert sharded[3], "checkpoints cut the states as they cut the parameters"
    assert plain[4] == sharded[4] == "AdamW"
    assert sharded[2] < 60_000, "torch takes a quarter of a million to place the thirty parameters"


def small_model(fused: bool) -> tuple[torch.nn.ParameterList, ShardedAdamW]:
    drawn = torch.Generator().manual_seed(0)
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(n, 4, generator=drawn)) for n in range(1, 4))
    settings = TrainingArguments.model_validate({"lr": 0.01, "weight_decay": 0.1, "adam_fused": fused})
    optimizer = build_optimizer(model, settings, note=print)
    assert isinstance(optimizer, ShardedAdamW)
    return model, optimizer


def numbers_of(model: torch.nn.ParameterList, optimizer: ShardedAdamW) -> list[torch.Tensor]:
    states = [tensor for parameter in model for tensor in optimizer.state[parameter].values()]
    return [tensor.detach().clone() for tensor in (*model, *states)]


def test_an_update_is_left_out_where_a_tensor_says_so() -> None:
    """Weights, moments and the count of steps are then those before it; else those of a plain step, to the bit."""
    (model, optimizer), (other, plain) = small_model(fused=True), small_model(fused=True)
    drawn = torch.Generator().manual_seed(1)
    for left_out in (False, True, False, True, True, False):
        before = numbers_of(model, optimizer)
        for parameter, twin in zip(model, other, strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=drawn)
            twin.grad = parameter.grad.clone()
            if left_out:
                parameter.grad[0, 0] = float("nan")
        optimizer.step_unless(torch.tensor(float(left_out)))
        if not left_out:
            plain.step()
        after, expected = numbers_of(model, optimizer), numbers_of(other, plain)
        assert all(map(torch.equal, after, before if left_out else expected))
    assert optimizer.found_inf is None


def test_the_device_decides_only_where_its_kernel_does() -> None:
    assert small_model(fused=True)[1].can_leave_out_on(torch.device("cpu"))
    assert not small_model(fused=False)[1].can_leave_out_on(torch.device("cpu"))
    assert not small_model(fused=True)[1].can_leave_out_on(torch.device("meta"))  # the parameters are elsewhere


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_kernel_that_does_not_obey_is_found(is_refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch._fused_adamw_

    def kernel(*given: Any, found_inf: Any, **settings: Any) -> None:
        if is_refused:
            raise RuntimeError("found_inf is not supported")
        real(*given, found_inf=None, **settings)

    monkeypatch.setattr(torch, "_fused_adamw_", kernel)
    assert not small_model(fused=True)[1].can_leave_out_on(torch.device("cpu"))
