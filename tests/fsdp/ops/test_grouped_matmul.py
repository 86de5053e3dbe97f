"""Grouped products equal one product a group, forward and backward, by kernel and by loop."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from mindspeed_mm.fsdp.ops.grouped_matmul import grouped_linear, has_kernel

COUNTS = [
    [3, 0, 5, 1],
    [0, 0, 0, 9],
    [0, 0, 0, 0],
]


def one_by_one(
    rows: torch.Tensor, weight: torch.Tensor, counts: Sequence[int], bias: torch.Tensor | None
) -> torch.Tensor:
    parts = [part @ own.T for part, own in zip(rows.split(list(counts)), weight, strict=True)]
    if bias is not None:
        parts = [part + own for part, own in zip(parts, bias, strict=True)]
    return torch.cat(parts)


def inputs(dtype: torch.dtype, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((rows, 16), (4, 8, 16), (4, 8))
    made = [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    return made[0], made[1], made[2]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_equals_one_product_a_group(
    counts: list[int], transposed: bool, with_bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    rows, weight, bias = inputs(dtype, sum(counts))
    leaves = [rows, weight, *([bias] if with_bias else [])]
    given = weight.transpose(1, 2) if transposed else weight
    found = grouped_linear(rows, given, torch.tensor(counts), bias if with_bias else None, transposed=transposed)
    # `sum` hands back a gradient expanded from one number, which the kernel alone would refuse.
    found_gradients = torch.autograd.grad(found.sum(), leaves)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = one_by_one(wide[0], wide[1], counts, wide[2] if with_bias else None)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    for own, reference in zip(found_gradients, torch.autograd.grad(expected.sum(), wide), strict=True):
        torch.testing.assert_close(own.double(), reference, rtol=tolerance, atol=tolerance)


def test_gradients_of_the_loop_are_right() -> None:
    rows, weight, bias = inputs(torch.float64, 9)
    counts = torch.tensor(COUNTS[0])
    assert torch.autograd.gradcheck(lambda *leaves: grouped_linear(leaves[0], leaves[1], counts, leaves[2]),
                                    (rows, weight, bias))  # fmt: skip


def test_groups_without_rows_get_zeros_not_none() -> None:
    for dtype in (torch.float64, torch.float32):
        rows, weight, _ = inputs(dtype, 9)
        (gradient,) = torch.autograd.grad(grouped_linear(rows, weight, torch.tensor(COUNTS[1])).sum(), [weight])
        assert gradient[:3].eq(0).all() and gradient[3].ne(0).any()


@pytest.mark.parametrize(
    ("dtype", "width", "takes"),
    [(torch.float32, 16, True), (torch.bfloat16, 16, True), (torch.float64, 16, False), (torch.float32, 15, False)],
)
def test_kernel_is_used_where_it_can_be(dtype: torch.dtype, width: int, takes: bool) -> None:
    rows, weight = torch.ones(2, width, dtype=dtype), torch.ones(3, 16, width, dtype=dtype)
    assert has_kernel(rows, weight) is takes
    grouped_linear(rows, weight, torch.tensor([1, 0, 1]))


def test_rows_of_a_wider_type_are_cast_to_the_weights() -> None:
    rows, weight, _ = inputs(torch.bfloat16, 9)
    assert grouped_linear(rows.float(), weight, torch.tensor(COUNTS[0])).dtype == torch.bfloat16


def test_frozen_weights_and_inputs_without_gradients() -> None:
    rows, weight, _ = inputs(torch.float64, 9)
    (gradient,) = torch.autograd.grad(grouped_linear(rows.detach(), weight, torch.tensor(COUNTS[0])).sum(), [weight])
    assert gradient.shape == weight.shape
    (gradient,) = torch.autograd.grad(grouped_linear(rows, weight.detach(), torch.tensor(COUNTS[0])).sum(), [rows])
    assert gradient.shape == rows.shape
