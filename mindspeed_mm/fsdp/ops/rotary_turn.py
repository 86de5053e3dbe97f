"""Rotary embeddings by four operations each way, where what libraries write takes five forward and up to eight
backward: what is computed and how it is rounded stays the same to the bit.

The halves of a head change places in one operation, and the sign that belongs to it goes into the sines, once for all
layers that are given them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

_SIGNED = "_mm_signed_sines"


def turned(x: Tensor, cos: Tensor, sin: Tensor, *, heads_dim: int, parts: int, is_wide: bool) -> Tensor:
    """x · cos + (−x₂, x₁) · sin for each part of each head, whose halves are x₁ and x₂ (Su et al. 2021,
    arXiv:2104.09864).

    Args:
        x: Heads last but for one other dimension at most, (…, D).
        cos: As x without the heads, (…, D). Gets no gradient.
        sin: Like `cos`.
        heads_dim: The dimension of heads that cosines and sines lack.
        parts: How many parts of D turn by themselves.
        is_wide: Compute in fp32 at least, and round to the type of x at the end.
    """
    signed = _signed(sin, parts)
    given = x
    if is_wide:
        given = x.to(torch.promote_types(x.dtype, torch.float32))
    output: Tensor = _Turn.apply(given, cos.unsqueeze(heads_dim), signed.unsqueeze(heads_dim), parts)  # type: ignore[no-untyped-call]
    if is_wide:
        return output.to(x.dtype)
    return output


def _signed(sin: Tensor, parts: int) -> Tensor:
    """The sines of first halves negated; kept with the sines, for the layers that follow."""
    known: tuple[int, Tensor] | None = getattr(sin, _SIGNED, None)
    if known is None or known[0] != parts:
        halves = sin.detach().unflatten(-1, (parts, 2, -1)).clone()
        halves[..., 0, :].neg_()
        known = (parts, halves.flatten(-3))
        setattr(sin, _SIGNED, known)
    return known[1]


class _Turn(torch.autograd.Function):
    """x · cos + swapped(x) · sin, whose gradient is g · cos + swapped(g · sin)."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, parts: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.parts, ctx.dtype = parts, x.dtype
        output = x * cos
        output += _swapped(x, parts) * sin
        return output

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        output = grad * cos
        output += _swapped(grad * sin, ctx.parts)
        return output.to(ctx.dtype), None, None, None


def _swapped(x: Tensor, parts: int) -> Tensor:
    """The halves of each part in each other's place."""
    return x.unflatten(-1, (parts, 2, -1)).flip(-2).flatten(-3)
