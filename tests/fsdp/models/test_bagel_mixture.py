"""Attention of BAGEL's samples, which are as long as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mindspeed_mm.fsdp.models.bagel.mixture import Samples, attend

PARTS = torch.tensor([[0, 1, 1, 1, 0, -2, -2], [0, 0, -1, -1, -1, 2, 2]])


@pytest.mark.parametrize(
    ("samples", "expected_calls"),
    [
        (Samples.of_rows(PARTS, None, None), 1),
        (Samples([(0, 7), (7, 14)], [None, None]), 1),
        (Samples.of_rows(PARTS.view(1, 14), torch.tensor([0, 3, 7, 14]), None), 3),
    ],
    ids=("rows that are padded", "pictures of one size", "other lengths"),
)
def test_samples_of_one_length_are_attended_to_in_one_call(
    samples: Samples, expected_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sample gets what it gets alone, and so do the gradients of its keys."""
    draw = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(1, 14, heads, 4, generator=draw, dtype=torch.float64).requires_grad_() for heads in (6, 3, 3)
    )
    calls: list[int] = []
    kernel = F.scaled_dot_product_attention

    def counted(*given: Any) -> torch.Tensor:
        calls.append(len(given))
        return kernel(*given)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    found = attend(query, key, value, samples)
    assert len(calls) == expected_calls
    each = zip(samples.documents, samples.masks, strict=True)
    apart = [
        attend(*(whole[:, start:stop] for whole in (query, key, value)), Samples([(0, stop - start)], [mask]))
        for (start, stop), mask in each
    ]
    expected = torch.cat(apart, dim=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(output.square().sum(), key)[0] for output in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)
