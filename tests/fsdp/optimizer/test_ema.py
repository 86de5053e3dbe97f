"""The average of the weights equals the formula, under every plan, and changes places with the weights exactly."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.fsdp.optimizer import ema as ema_module
from mindspeed_mm.fsdp.optimizer.ema import Ema, OldPolicy, decay_at
from mindspeed_mm.fsdp.params.diffusion_args import EmaArguments
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import full

STEPS = 6


def arguments(**changes: Any) -> EmaArguments:
    return EmaArguments.model_validate({"enable": True, "decay": 0.6} | changes)


def small(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Odd sizes, so that ranks hold shards of unequal length; the middle layer is frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 3)).to(dtype)
    model[1].requires_grad_(False)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Every rank takes the same batch, a function of the step."""
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p) for name, p in model.named_parameters() if p.requires_grad}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# --- the formula -----------------------------------------------------------------------------------------------------


def by_hand(weights: list[dict[str, torch.Tensor]], decay: float, warmup: bool, interval: int) -> Any:
    """The average after each step; `weights[0]` are those before the first."""
    average, history = weights[0], []
    for n, now in enumerate(weights[1:], start=1):
        if n % interval == 0:
            d = (min(decay, (1 + n) / (10 + n)) if warmup else decay) ** interval
            average = {name: d * average[name] + (1 - d) * now[name] for name in now}
        history.append(average)
    return history


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("warmup", [True, False])
@pytest.mark.parametrize("fault", [None, "updated before the step", "decay of the step before"])
def test_is_the_formula(warmup: bool, interval: int, fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(decay=0.3, warmup=warmup, interval=interval)  # warm-up reaches it at step 3
    model = small()
    optimizer, ema = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1), Ema(model, args)
    if fault == "decay of the step before":
        monkeypatch.setattr(ema_module, "decay_at", lambda step, args: decay_at(step - 1, args))
    weights, averages = [trained(model)], []
    for number in range(1, STEPS + 1):
        if fault == "updated before the step":
            ema.update(number)
        step(model, optimizer, number)
        if fault != "updated before the step":
            ema.update(number)
        weights.append(trained(model))
        averages.append({name: tensor.clone() for name, tensor in ema.tensors().items()})
    expected = by_hand(weights, 0.3, warmup, interval)
    off = max(largest_difference(*pair) for pair in zip(expected, averages, strict=True))
    if fault is None or (fault.startswith("decay") and not warmup):  # without warm-up there is one decay
        assert off < 1e-14
    else:
        assert off > 1e-3


def test_one_update_of_two_steps_reaches_back_as_far_as_two_of_one() -> None:
    args = arguments(decay=0.9, warmup=False)
    assert decay_at(2, arguments(decay=0.9, warmup=False, interval=2)) == pytest.approx(decay_at(2, args) ** 2)
    assert [decay_at(n, arguments()) for n in (1, 2, 3, 100)] == [2 / 11, 3 / 12, 4 / 13, 0.6]


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
    ids=str,
)
def test_precision_and_what_is_averaged(dtype: torch.dtype, kept: torch.dtype) -> None:
    model = small(dtype)
    ema = Ema(model, arguments(warmup=False, decay=0.999))
    assert ema.tensors().keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    before = {name: tensor.clone() for name, tensor in ema.tensors().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1  # in bf16 a thousandth of it would be lost
    ema.update(1)
    for name, tensor in ema.tensors().items():
        assert tensor.dtype == kept
        expected = 0.999 * before[name] + 0.001 * model.get_parameter(name).to(kept)
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-7)
        assert not torch.equal(tensor, before[name])


# --- in the model and back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_and_average_change_places_exactly(dtype: torch.dtype) -> None:
    model = small(dtype)
    ema = Ema(model, arguments(warmup=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.7
    ema.update(1)
    weights, average = trained(model), {name: tensor.clone() for name, tensor in ema.tensors().items()}
    memory = {name: p.data_ptr() for name, p in model.named_parameters()}
    for _ in range(2):
        with ema.applied():
            inside = trained(model)
        assert all(torch.equal(inside[name], average[name].to(dtype)) for name in average)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in trained(model).items())
        assert all(torch.equal(tensor, average[name]) for name, tensor in ema.tensors().items())
    assert memory == {name: p.data_ptr() for name, p in model.named_parameters()}


def test_an_error_inside_and_one_half_way_leave_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    ema = Ema(model, arguments())
    step(model, torch.optim.SGD(model.parameters(), lr=0.5), 1)
    ema.update(1)
    weights, average = trained(model), {name: tensor.clone() for name, tensor in ema.tensors().items()}
    with suppress(KeyError), ema.applied():
        raise KeyError
    swap, calls = ema_module._swap, []

    def fails_at_the_third(*tensors: torch.Tensor) -> None:
        calls.append(tensors)
        if len(calls) == 3:
            raise MemoryError
        swap(*tensors)

    monkeypatch.setattr(ema_module, "_swap", fails_at_the_third)
    with suppress(MemoryError), ema.applied():
        pytest.fail("was entered")
    assert len(calls) == 5  # two there, one that failed, two back
    assert all(torch.equal(tensor, weights[name]) for name, tensor in trained(model).items())
    assert all(torch.equal(tensor, average[name]) for name, tensor in ema.tensors().items())


def test_nothing_else_is_done_with_the_average_while_it_is_in_the_model() -> None:
    model = small()
    ema = Ema(model, arguments())
    tensors = ema.tensors()
    with ema.applied():
        for action in (ema.applied().__enter__, lambda: ema.update(1), ema.tensors, lambda: ema.load(tensors)):
            with pytest.raises(MMError, match="is in the model now and cannot be"):
                action()
    ema.update(1)


def test_load_and_restart() -> None:
    model = small()
    ema, other = Ema(model, arguments()), Ema(small(), arguments())
    step(model, torch.optim.SGD(model.parameters(), lr=0.5), 1)
    ema.update(1)
    other.load(ema.tensors())
    assert largest_difference(ema.tensors(), other.tensors()) == 0
    assert largest_difference(ema.tensors(), trained(model)) > 1e-3
    ema.restart()
    assert largest_difference(ema.tensors(), trained(model)) == 0
    with pytest.raises(MMError, match="1 tensors differ"):
        other.load({**ema.tensors(), "more": torch.zeros(1)})


# --- sharded ---------------------------------------------------------------------------------------------------------


def sharded(layout: str) -> nn.Module:
    """`layout` names a mesh (`2`, `2x2`: copies × shards) and how it is used."""
    mesh_shape, _, use = layout.partition(" ")
    sizes = tuple(map(int, mesh_shape.split("x")))
    mesh = dist.init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "shards")[-len(sizes) :])
    offload = CPUOffloadPolicy(pin_memory=False) if use == "offloaded" else OffloadPolicy()
    model = small()
    for module in (*model, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=use != "kept gathered", offload_policy=offload)
    return model


def averaged_run(layout: str, fault: str | None = None) -> dict[str, Any]:
    """Train, then look at the average and at what the model makes of an input with it."""
    model = sharded(layout) if layout else small()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    ema = Ema(model, arguments())
    for number in range(1, STEPS + 1):
        step(model, optimizer, number)
        ema.update(number - (fault == "decay off by one"))
    probe = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3)
    stale = mock.patch.object(ema_module, "_forget_gathered", lambda model: None)
    with stale if fault == "gathered weights kept" else nullcontext(), torch.no_grad():
        before = model(probe).clone()  # without a backward pass: modules stay gathered
        with ema.applied():
            inside = model(probe).clone()
        after = model(probe).clone()
    return {
        "average": {name: full(tensor) for name, tensor in ema.tensors().items()},
        "outputs": {"before": before, "inside": inside, "after": after},
        "sharded": all(isinstance(tensor, DTensor) for tensor in ema.tensors().values()),
    }


def averaged_runs(layouts: list[str]) -> list[dict[str, Any]]:
    return [averaged_run(layout) for layout in layouts]


LAYOUTS = {1: ["1"], 2: ["2", "2 kept gathered", "2 offloaded", "2x1"], 4: ["2x2"]}


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_sharded_average_is_the_plain_one(ranks: int) -> None:
    expected = averaged_run("")
    for found in (each for rank in run_ranks(ranks, averaged_runs, LAYOUTS[ranks]) for each in rank):
        assert found["sharded"]
        assert largest_difference(expected["average"], found["average"]) < 1e-12
        assert largest_difference(expected["outputs"], found["outputs"]) < 1e-12
    outputs = expected["outputs"]
    assert torch.equal(outputs["before"], outputs["after"])
    assert float((outputs["inside"] - outputs["after"]).abs().max()) > 1e-3


@pytest.mark.parametrize(("fault", "kind"), [("decay off by one", "average"), ("gathered weights kept", "outputs")])
def test_a_fault_is_seen(fault: str, kind: str) -> None:
    expected = averaged_run("")
    for found in run_ranks(2, averaged_run, "2 kept gathered", fault):
        assert largest_difference(expected[kind], found[kind]) > 1e-3


def test_an_old_policy_follows_when_a_rollout_is_used_up() -> None:
    """old ← d old + (1 − d) new, every second step, with d of the step."""
    model = small()
    old = OldPolicy(model, 2, lambda number: 0.1 * number)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = trained(model)
    for number in range(1, 5):
        step(model, optimizer, number)
        old.update(number)
        if number % 2 == 0:
            now = trained(model)
            expected = {name: 0.1 * number * each + (1 - 0.1 * number) * now[name] for name, each in expected.items()}
        assert largest_difference(old.tensors(), expected) < 1e-15
