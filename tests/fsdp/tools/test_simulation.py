"""Operators on real and fake tensors in a simulated step: what they return, and what is booked for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional

from mindspeed_mm.fsdp.tools.memory_model.ledger import MemoryLedger
from mindspeed_mm.fsdp.tools.memory_model.simulation import Simulation

ROWS, COLUMNS = 6, 8
LARGE = (3, 1 << 20)
"""Too large to be computed for real."""
IDS = torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS) % ROWS
HALF = torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16)
MASK = IDS > 2
Operator = Callable[[torch.Tensor], torch.Tensor]
OPERATORS: dict[str, Operator] = {
    "gather": lambda x: x.gather(1, IDS),
    "written into a fake one": lambda x: x.scatter_add_(1, IDS, HALF.float()),
    "types": lambda x: x.bfloat16() * IDS,
    "turned": lambda x: x.t() + HALF.t(),
    "spread": lambda x: x * torch.ones(1, 1).expand(ROWS, COLUMNS),
    "list": lambda x: torch.cat([x, HALF.float(), IDS.float()], dim=1),
    "numbers": lambda x: x[IDS[:, 0]],
    "mask": lambda x: x[MASK],
    "by name": lambda x: functional.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(ROWS, ROWS).bool()),
    "out": lambda x: torch.mul(x, HALF, out=x.new_empty(ROWS, COLUMNS)),
    "type of a scalar": lambda x: x.bfloat16() * torch.tensor(2.0, dtype=torch.float64),
    "whole scalar": lambda x: x + torch.tensor(2),
    "slices": lambda x: x[1:-1, 2::3],
    "behind the end": lambda x: x[4:99, -3:],
    "nothing": lambda x: x[3:2],
    "number beside a scalar": lambda x: x.bfloat16().sum() * 2.0,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_result_is_that_of_real_tensors(name: str) -> None:
    operator = OPERATORS[name]
    expected, simulation = operator(torch.zeros(ROWS, COLUMNS)), Simulation(MemoryLedger())
    with simulation:
        found = operator(simulation.empty((ROWS, COLUMNS), torch.float32))
        bypassed = FakeTensorMode.cache_bypasses["non-fake tensor"]
        again = operator(simulation.empty((ROWS, COLUMNS), torch.float32))
    for result in (found, again):
        assert isinstance(result, FakeTensor)
        assert (result.shape, result.stride(), result.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert FakeTensorMode.cache_bypasses["non-fake tensor"] == bypassed  # torch knew the result


@pytest.mark.parametrize("dim", [0, 1])
def test_slices_that_begin_elsewhere_are_known(dim: int) -> None:
    """What torch had to find out, by the number of slices."""
    found = []
    for count in (2, 4):
        with Simulation(MemoryLedger()) as simulation:
            FakeTensorMode.cache_clear()
            fake = simulation.empty((ROWS, COLUMNS), torch.float32)
            for start in range(count):
                fake.narrow(dim, start, 2).mul(3)
        found.append(FakeTensorMode.cache_misses)
    assert found[0] == found[1] > 0


def test_a_slice_of_known_numbers_begins_where_it_does() -> None:
    pixels = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    with Simulation(MemoryLedger()) as simulation:
        found = simulation.fake_batch({"pixels": pixels}, None)["pixels"][2:4] == 2 * COLUMNS
    assert torch.equal(found, pixels[2:4] == 2 * COLUMNS) and found.sum() == 1


def test_views_of_a_large_real_tensor_are_booked_once() -> None:
    large, ledger = torch.zeros(LARGE), MemoryLedger()
    with Simulation(ledger):
        flat, rows = large.view(-1), large[1:]
    assert flat.untyped_storage()._cdata == rows.untyped_storage()._cdata
    assert ledger.log.sizes == [large.nbytes]
