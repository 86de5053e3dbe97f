"""Outputs that torch's pytree cannot look into still train right, or are refused; never silently left unreduced."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.distributed.job.launch import initialize_distributed, shutdown_distributed
from mindspeed_mm.fsdp.distributed.sharding.fully_shard import plan_units, shard_units
from mindspeed_mm.fsdp.distributed.sharding.visible_outputs import hides_tensors
from mindspeed_mm.fsdp.params.parallel_args import FsdpPlan


@dataclass
class Output:
    logits: torch.Tensor


class Model(nn.Module):
    def __init__(self, block_hides: bool) -> None:
        super().__init__()
        self.block_hides = block_hides
        self.block = Block(block_hides)

    def forward(self, x: torch.Tensor) -> Output:
        y = self.block(x)
        return Output(y.logits if self.block_hides else y)


class Block(nn.Module):
    def __init__(self, hides: bool) -> None:
        super().__init__()
        self.hides = hides
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> object:
        y = self.linear(x)
        return Output(y) if self.hides else y


@pytest.fixture(autouse=True)
def one_process() -> object:
    initialize_distributed(30.0)
    yield
    shutdown_distributed()


def sharded(block_hides: bool, units: list[str]) -> nn.Module:
    model = Model(block_hides)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    shard_units(model, plan_units(units, ()), FsdpPlan(), mesh, set())
    return model


def test_hidden_output_of_the_root_reaches_its_parameters() -> None:
    model = sharded(block_hides=True, units=[])
    output = model(torch.ones(2, 4))
    assert isinstance(output, Output)
    output.logits.sum().backward()
    gradient = model.block.linear.weight.grad
    assert gradient is not None and gradient.full_tensor().eq(2.0).all()


def test_hidden_output_of_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="block returns its tensors in a Output"):
        sharded(block_hides=True, units=["block"])(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("value", "hides"),
    [(Output(torch.ones(1)), True), (torch.ones(1), False), ({"a": torch.ones(1)}, False), (3, False)],
)
def test_what_counts_as_hidden(value: object, hides: bool) -> None:
    assert hides_tensors(value) is hides
