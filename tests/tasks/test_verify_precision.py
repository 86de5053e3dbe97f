"""fp64 stays fp64 where a model rounds, also where layers are computed again in the backward pass."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mindspeed_mm.fsdp.data.dataloader.fetch import BatchMaker
from mindspeed_mm.tasks.verify.precision import keeping_double


def rounding(x: torch.Tensor) -> torch.Tensor:
    dtypes.append((x.float().dtype, x.to(torch.float32).dtype, torch.softmax(x, -1, dtype=torch.float32).dtype))
    return x.type(torch.float32).square().sum()


dtypes: list[tuple[torch.dtype, ...]] = []


def test_nothing_is_rounded() -> None:
    dtypes.clear()
    x = torch.full((3,), 1 + 1e-12, dtype=torch.float64, requires_grad=True)
    with keeping_double():
        checkpoint(rounding, x, use_reentrant=False).backward()
    assert dtypes == [(torch.float64,) * 3] * 2
    assert x.grad is not None and x.grad[0] == 2 * (1 + 1e-12)


def test_other_types_are_left_alone() -> None:
    with keeping_double():
        assert torch.zeros(2, dtype=torch.bfloat16).float().dtype == torch.float32
        assert torch.zeros(2, dtype=torch.int64).to(torch.float32).dtype == torch.float32
        assert torch.zeros(2, dtype=torch.float64).to(torch.bfloat16).dtype == torch.bfloat16
    assert torch.zeros(2, dtype=torch.float64).float().dtype == torch.float32


def test_whole_numbers_are_kept_where_it_is_asked_for() -> None:
    """Sizes and positions, which meet fp64 in GLM-4V; bytes are raw media."""
    with keeping_double(of_whole_numbers=True):
        for whole in (torch.int64, torch.int32, torch.bool):
            assert torch.zeros(2, dtype=whole).to(torch.float32).dtype == torch.float64
            assert torch.zeros(2, dtype=whole).float().dtype == torch.float64
        assert torch.zeros(2, dtype=torch.uint8).float().dtype == torch.float32
        assert torch.zeros(2, dtype=torch.bfloat16).float().dtype == torch.float32


def test_batches_are_made_as_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feature extractor of sound rounds its filters to fp32 and multiplies them by sound in fp32."""
    filters = torch.zeros(2, dtype=torch.float64)
    monkeypatch.setattr(
        BatchMaker, "__getitem__", lambda self, _: (filters.float().dtype, filters.to(torch.float32).dtype)
    )
    with keeping_double():
        assert BatchMaker.__new__(BatchMaker)[0] == (torch.float32, torch.float32)
        assert filters.float().dtype == torch.float64
