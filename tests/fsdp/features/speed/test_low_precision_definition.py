"""Products in 8 bits, by the arithmetic that a CPU can follow, beside their definition in fp64: scales, saturation and
rounding to e4m3 and e5m2 (Micikevicius et al. 2022, arXiv:2209.05433; Rouhani et al. 2023, arXiv:2310.10537).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from mindspeed_mm.fsdp.features.speed.low_precision import apply_low_precision
from mindspeed_mm.fsdp.params.training_args import QuantizationPlan

Matrix = NDArray[np.float64]
ROWS, WIDE, OUT = 64, 96, 32
BLOCK = 32


class Format(NamedTuple):
    """An 8-bit float."""

    mantissa: int
    least_exponent: int
    """Of normal numbers; below it they are as far apart as at it."""
    largest: float


E4M3, E5M2 = Format(3, -6, 448.0), Format(2, -14, 57344.0)


def rounded(x: Matrix, form: Format) -> Matrix:
    """The nearest number of a format, the even one of two; what is too large becomes the largest."""
    x = np.clip(x, -form.largest, form.largest)
    exponent = np.maximum(np.floor(np.log2(np.abs(x), where=x != 0, out=np.full_like(x, -99))), form.least_exponent)
    apart = 2.0 ** (exponent - form.mantissa)
    return np.rint(x / apart) * apart


def as_fp32(x: Matrix) -> Matrix:
    return x.astype(np.float32).astype(np.float64)


def scaled(x: Matrix, form: Format, axis: int | None, *, by_powers: bool = False) -> Matrix:
    """What is left of a matrix: one scale for all of it, or one for each line along an axis."""
    scale = as_fp32(form.largest / np.abs(x).max(axis=axis, keepdims=True))
    if by_powers:
        scale = 2.0 ** np.floor(np.log2(scale))
    return rounded(as_fp32(x * scale), form) / scale


def in_blocks(x: Matrix, axis: int) -> Matrix:
    """Blocks along an axis share a power of two, the least that leaves no number too large."""
    turned = np.moveaxis(x, axis, -1)
    blocks = turned.reshape(*turned.shape[:-1], -1, BLOCK)
    scale = 2.0 ** np.ceil(np.log2(np.abs(blocks).max(-1, keepdims=True) / E4M3.largest))
    return np.moveaxis((rounded(blocks / scale, E4M3) * scale).reshape(turned.shape), -1, axis)


Operands = tuple[Matrix, Matrix]
Definition = Callable[[Matrix, Matrix, Matrix], tuple[Operands, Operands, Operands]]
"""Input (rows, in), weight (out, in) and gradient (rows, out) → the operands of the products that sum over in, out and
rows, each with the scales that it has there."""


def tensorwise(x: Matrix, w: Matrix, g: Matrix) -> tuple[Operands, Operands, Operands]:
    x8, w8, g8 = scaled(x, E4M3, None), scaled(w, E4M3, None), scaled(g, E5M2, None)
    return (x8, w8), (g8, w8), (g8, x8)


def along(x: Matrix, axis: int) -> Matrix:
    return scaled(x, E4M3, axis, by_powers=True)


def rowwise(x: Matrix, w: Matrix, g: Matrix) -> tuple[Operands, Operands, Operands]:
    """A scale for each line that is summed over."""
    return (along(x, 1), along(w, 1)), (along(g, 1), along(w, 0)), (along(g, 0), along(x, 0))


def exact_weights(x: Matrix, w: Matrix, g: Matrix) -> tuple[Operands, Operands, Operands]:
    """As `rowwise`, the weight with one scale backward, and its own gradient by plain numbers."""
    whole = scaled(w, E4M3, None, by_powers=True)
    return (along(x, 1), along(w, 1)), (along(g, 1), whole), (g, x)


def blockwise(x: Matrix, w: Matrix, g: Matrix) -> tuple[Operands, Operands, Operands]:
    return (in_blocks(x, 1), in_blocks(w, 1)), (in_blocks(g, 1), in_blocks(w, 0)), (in_blocks(g, 0), in_blocks(x, 0))


def not_rounded(x: Matrix, w: Matrix, g: Matrix) -> tuple[Operands, Operands, Operands]:
    """Plain products."""
    return (x, w), (g, w), (g, x)


def of_the_wrong_axis(x: Matrix, w: Matrix, g: Matrix) -> tuple[Operands, Operands, Operands]:
    """What `rowwise` is not."""
    return (along(x, 0), along(w, 0)), (along(g, 0), along(w, 1)), (along(g, 1), along(x, 1))


DEFINITIONS: dict[str, Definition] = {
    "tensorwise": tensorwise,
    "rowwise": rowwise,
    "rowwise_with_gw_hp": exact_weights,
    "mxfp8": blockwise,
}


def products(define: Definition, x: Matrix, w: Matrix, g: Matrix) -> list[Matrix]:
    """Output, gradient of the input, gradient of the weight."""
    (x_in, w_in), (g_out, w_out), (g_rows, x_rows) = define(x, w, g)
    return [x_in @ w_in.T, g_out @ w_out, g_rows.T @ x_rows]


def uneven() -> list[torch.Tensor]:
    """Input, weight and gradient. Each product sums over numbers that differ by up to 10⁵ and weigh the same: scales
    matter, and what goes under is missed."""
    generator = torch.Generator().manual_seed(3)
    rows, wide, out = (10 ** (5 * torch.rand(size, generator=generator) - 2.5) for size in (ROWS, WIDE, OUT))
    spread = (rows[:, None] * wide, out[:, None] / wide, 1 / (rows[:, None] * out))
    return [each * torch.randn(each.shape, generator=generator) for each in spread]


def measured(recipe: str, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> list[Matrix]:
    """The same three of a converted layer."""
    layer = nn.Sequential(nn.Linear(WIDE, OUT, bias=False))
    with torch.no_grad():
        layer[0].weight.copy_(w)
    apply_low_precision(
        layer, QuantizationPlan.model_validate({"recipe_name": recipe, "extra_args": {"emulate": True}})
    )
    x = x.clone().requires_grad_()
    output = layer(x)
    output.backward(g)
    found = [output.detach(), x.grad, layer[0].weight.grad]
    return [each.double().numpy() for each in found if each is not None]


def error(found: Matrix, expected: Matrix) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("recipe", DEFINITIONS)
def test_products_are_those_of_the_definition(recipe: str) -> None:
    x, w, g = uneven()
    found = measured(recipe, x, w, g)
    exact = [each.double().numpy() for each in (x, w, g)]
    expected = products(DEFINITIONS[recipe], *exact)
    assert [each.shape for each in found] == [(ROWS, OUT), (ROWS, WIDE), (OUT, WIDE)]
    assert max(map(error, found, expected)) < 1e-6
    # The comparison tells what is rounded from what is not, one recipe from another, and one axis from the other.
    others = [define for name, define in DEFINITIONS.items() if name != recipe]
    for other in [*others, not_rounded, of_the_wrong_axis]:
        assert max(map(error, found, products(other, *exact))) > 1e-3


@pytest.mark.parametrize(("form", "dtype"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)])
def test_the_definition_has_the_numbers_of_the_formats(form: Format, dtype: torch.dtype) -> None:
    """All finite numbers of a format stay, and halves between two neighbours go to the even one, as torch casts."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    every = every[every.isfinite()].sort().values.unique()
    halves = (every[1:] + every[:-1]) / 2
    for numbers in (every, halves):
        assert np.array_equal(rounded(numbers.numpy(), form), numbers.float().to(dtype).double().numpy())
    assert float(rounded(np.array([1e9]), form)[0]) == float(torch.finfo(dtype).max)
