"""What a batch held on the host is known on the device; anything else is read once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed_mm.fsdp.ops.attention import varlen_attention
from mindspeed_mm.fsdp.ops.grouped_matmul import _by_loop
from mindspeed_mm.fsdp.ops.host_values import carry_host_values, host_values

pytestmark = pytest.mark.edge("D3")


class Counted:
    """Readings of tensors on the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        real = torch.Tensor.tolist

        def tolist(tensor: torch.Tensor) -> Any:
            self.count += 1
            return real(tensor)

        monkeypatch.setattr(torch.Tensor, "tolist", tolist)


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def test_borders_are_read_once_for_all_layers(readings: Counted) -> None:
    borders, heads = torch.tensor([0, 2, 5]), torch.randn(1, 2, 5, 4)
    for _ in range(3):
        varlen_attention(torch.nn.Module(), heads, heads, heads, None, cu_seq_lens_q=borders)
    assert readings.count == 1


def test_borders_that_the_host_had_are_not_read(readings: Counted) -> None:
    host = {"cu_seq_lens_q": torch.tensor([0, 2, 5]), "image_grid_thw": torch.tensor([[1, 2, 4]])}
    moved = {name: tensor.clone() for name, tensor in host.items()}
    carry_host_values(host, moved)
    readings.count = 0
    assert host_values(moved["cu_seq_lens_q"]) == [0, 2, 5]
    assert host_values(moved["image_grid_thw"]) == [[1, 2, 4]]
    assert readings.count == 0


def test_rows_of_experts_are_read_once_for_both_products(readings: Counted) -> None:
    counts, rows = torch.tensor([2, 0, 3]), torch.randn(5, 4, dtype=torch.float64)
    weight = torch.randn(3, 4, 4, dtype=torch.float64)
    inner = _by_loop(rows, weight, counts)
    _by_loop(inner, weight, counts)
    assert readings.count == 1
