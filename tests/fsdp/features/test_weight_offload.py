"""Frozen weights wait on the host until their block runs: the same numbers to the bit, and two blocks at a time."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.features.apply_features import FeaturesApplier
from mindspeed_mm.fsdp.features.memory import weight_offload
from mindspeed_mm.fsdp.features.memory.weight_offload import WeightTraffic
from mindspeed_mm.fsdp.models.behaviour.quantized_linear import can_shard_bytes
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.utils.host_copies import HostCopies
from tests.helpers.distributed import run_ranks
from tests.helpers.planned_steps import train_steps
from tests.helpers.runs import mm
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_generators import make_tiny_flux

BLOCKS = 5
WAITING = {"enable_weight_offload": True, "weight_offload_plan": {"apply_modules": ["blocks.{*}"]}}
RECOMPUTE = {"recompute": True, "recompute_plan": {"apply_modules": ["blocks.{*}"]}}
OFFLOAD = "features.enable_weight_offload=true"
LORA = ("training.lora.enable=true", "training.lora.rank=4", "features.recompute=true")


class Block(nn.Module):
    """A frozen layer, whose weight is saved itself, and a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.scale, self.trained = nn.Linear(8, 8), nn.Parameter(torch.rand(8)), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.scale.requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.trained(torch.tanh(self.frozen(hidden) * self.scale))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def chain() -> Chain:
    torch.manual_seed(0)
    return Chain()


def waiting(model: nn.Module, **recompute: Any) -> nn.Module:
    plan = {**RECOMPUTE["recompute_plan"], **recompute}  # type: ignore[dict-item]
    return FeaturesApplier(FeatureArguments.model_validate({**WAITING, "recompute": True, "recompute_plan": plan}))(
        model
    )


def step(model: nn.Module) -> list[torch.Tensor]:
    """Two micro-batches, and a pass without gradients between them."""
    inputs = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    (first := model(inputs).square().mean()).backward()
    with torch.no_grad():
        middle = model(inputs + 1)
    (second := model(inputs * 2).square().mean()).backward()
    return [first, middle, second, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("recompute", [{}, {"use_reentrant": True}, {"mode": "selective"}], ids=str)
def test_the_same_to_the_bit(recompute: dict[str, Any]) -> None:
    plain = step(chain())
    found = step(waiting(chain(), **recompute))
    assert len(plain) == len(found) == 3 + 2 * BLOCKS
    assert all(map(torch.equal, plain, found))


def test_two_blocks_are_on_the_device_and_the_next_one_is_fetched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[tuple[int, list[int], int]] = []
    copied: list[int] = []
    enter, to_device = WeightTraffic.enter, HostCopies.to_device

    def watched(self: WeightTraffic, number: int, device: torch.device) -> None:
        before = len(copied)
        enter(self, number, device)
        entered.append((number, self.on_device, (len(copied) - before) // 3))

    monkeypatch.setattr(WeightTraffic, "enter", watched)
    monkeypatch.setattr(HostCopies, "to_device", lambda self, *a: copied.append(1) or to_device(self, *a))
    model = waiting(chain())
    model(torch.ones(1, 8, requires_grad=True)).sum().backward()
    forward = [(0, [0, 1], 2), (1, [1, 2], 1), (2, [2, 3], 1), (3, [3, 4], 1), (4, [4], 0)]
    backward = [(4, [3, 4], 1), (3, [2, 3], 1), (2, [1, 2], 1), (1, [0, 1], 1), (0, [0, 1], 0)]
    assert entered == forward + backward
    sizes = [p.untyped_storage().nbytes() for b in model.blocks for p in (b.frozen.weight, b.scale)]  # type: ignore[union-attr]
    assert sizes == [256, 32] * 2 + [4, 4] * 3
    assert model.blocks[4].frozen.weight.isnan().all() and model.blocks[4].frozen.weight.shape == (8, 8)  # type: ignore[union-attr, operator]


def test_a_block_that_is_fetched_too_late_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: weights have left before the backward pass."""
    bring = weight_offload._Block.bring
    times: list[int] = []

    def forgetful(self: Any, device: torch.device) -> None:
        times.append(1)
        if len(times) < 12:
            bring(self, device)

    monkeypatch.setattr(weight_offload._Block, "bring", forgetful)
    model = waiting(chain())
    model(torch.ones(1, 8, requires_grad=True)).sum().backward()
    assert any(p.grad is not None and p.grad.isnan().any() for p in model.parameters())


@pytest.mark.parametrize(
    ("features", "words"),
    [
        (WAITING, "is not computed again in the backward pass"),
        ({**WAITING, **RECOMPUTE, "recompute_plan": {"apply_modules": ["blocks.0"]}}, "'blocks.1' is not computed"),
    ],
)
def test_weights_that_would_be_kept_are_refused(features: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FeaturesApplier(FeatureArguments.model_validate(features))(chain())


def test_blocks_without_frozen_weights_are_refused() -> None:
    model = chain().requires_grad_(True)
    with pytest.raises(ConfigError, match=r"nothing in these blocks is frozen.*training\.lora\.enable"):
        waiting(model)


# --- through the trainer ----------------------------------------------------------------------------------------------


def make_run(folder: Path) -> str:
    make_tiny_flux(folder / "model", num_layers=2, num_single_layers=2)
    return str(make_tiny_generator_run(folder, "flux", training={"train_iters": 2}))


def same(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> bool:
    """To the bit, of what is trained."""
    pairs = zip(expected, found, strict=True)
    return all(
        torch.equal(one["loss"], other["loss"])
        and all(torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"] if "lora" in name)
        and all(
            torch.equal(gradient, other["gradients"][name])
            for name, gradient in one["gradients"].items()
            if gradient is not None
        )
        for one, other in pairs
    )


PLANS = {
    "plain": (),
    "sharded": ("parallel.fsdp_plan.param_dtype=bf16",),
    "bytes": ("parallel.fsdp_plan.param_dtype=bf16", "training.lora.quantize=nf4"),
}


@pytest.mark.parametrize("plan", PLANS)
def test_adapters_of_a_generator_are_trained_the_same(plan: str, tmp_path: Path) -> None:
    if plan == "bytes" and not can_shard_bytes():
        pytest.skip("bytes are sharded with a newer torch")
    yaml, words = make_run(tmp_path), [*LORA, *PLANS[plan]]
    assert same(train_steps(yaml, words), train_steps(yaml, [*words, OFFLOAD]))


def test_ranks_train_adapters_beside_their_own_weights(tmp_path: Path) -> None:
    yaml, words = make_run(tmp_path), [*LORA, *PLANS["sharded"]]
    expected = run_ranks(2, train_steps, yaml, words)
    found = run_ranks(2, train_steps, yaml, [*words, OFFLOAD])
    assert all(map(same, expected, found))


def test_mm_check_refuses_what_splits_the_weights(tmp_path: Path) -> None:
    said = mm("check", make_run(tmp_path), *LORA, OFFLOAD, "parallel.fsdp_plan.cpu_offload=true")
    assert said.code == 2
    assert "features.enable_weight_offload" in said.out + said.err
    assert "parallel.fsdp_plan.cpu_offload keeps all weights on the host" in said.out + said.err


def test_the_model_itself_is_not_changed() -> None:
    model = chain()
    before = copy.deepcopy(model.state_dict())
    waiting(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
