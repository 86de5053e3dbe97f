"""Counts of a step: denominators may be fractions, all else stays whole numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindspeed_mm.fsdp.train.step.tally import Tally


def tally(**counts: float) -> Tally:
    return Tally(
        counts,
        samples=3,
        tokens=2**40 + 1,
        slots=9,
        label_tokens=5,
        bad_samples=1,
        stop_requested=False,
        towers={"image": 1},
        flops={"causal": 1e15, "full": 3e15},
    )


def test_sums_over_ranks_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(vector: torch.Tensor, group: Any) -> None:
        assert vector.dtype == torch.float64
        vector.mul_(2)

    monkeypatch.setattr(dist, "all_reduce", doubled)
    summed = tally(loss=0.1, aux=7).summed_over(group=None)  # type: ignore[arg-type]
    assert summed.counts == {"loss": 0.2, "aux": 14}
    assert summed.flops == {"causal": 2e15, "full": 6e15}
    assert (summed.samples, summed.tokens, summed.label_tokens) == (6, 2**41 + 2, 10)
    assert all(isinstance(n, int) for n in (summed.samples, summed.tokens, summed.label_tokens, summed.towers["image"]))
    alone = tally(loss=0.1).summed_over(group=None, counts_samples=False)  # type: ignore[arg-type]
    assert alone.counts == {"loss": 0.0}


def test_denominators_are_never_zero_and_may_be_below_one() -> None:
    assert tally(loss=0.25, aux=0, other=4).denominators == {"loss": 0.25, "aux": 1, "other": 4}
