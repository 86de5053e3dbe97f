"""Microscaled products of experts, by the arithmetic that a CPU can follow, beside the definition of the format in
fp64: blocks of 32 along the dimension that is summed over share a power of two, and each number is an e4m3 (OCP
Microscaling Formats v1.0, sections 5.2, 5.3.1 and 6.3; the other way to find the power is that of cuBLAS).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from mindspeed_mm.fsdp.features.speed.low_precision import apply_low_precision
from mindspeed_mm.fsdp.features.speed.mx_products import FilledGroups
from mindspeed_mm.fsdp.ops import experts
from mindspeed_mm.fsdp.params.training_args import QuantizationPlan
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

prepare_for_transformers()

from transformers import GptOssConfig, NemotronHConfig, Qwen3MoeConfig  # noqa: E402  (the guard comes first)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts  # noqa: E402
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts  # noqa: E402

WIDE, OUT, NUMBER = 96, 64, 5
COUNTS = [37, 0, 131, 1, 64]
"""An expert without rows, some with rows that fill no block, one that fills more than torchao's 128, one that fills."""

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Rounded = Callable[[torch.Tensor, int], torch.Tensor]


# --- the definition ---------------------------------------------------------------------------------------------------


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """The nearest number with 3 bits of mantissa and exponents from -6, the even one of two; at most 448."""
    x = x.clamp(-448, 448)
    apart = 2.0 ** ((torch.frexp(x).exponent - 1).clamp(min=-6) - 3).double()
    return torch.round(x / apart) * apart


def least_power(top: torch.Tensor) -> torch.Tensor:
    """The least power of two that brings the largest number to 448 or below."""
    mantissa, exponent = torch.frexp(top / 448)
    return torch.where(mantissa == 0.5, exponent - 1, exponent)


def power_of_the_text(top: torch.Tensor) -> torch.Tensor:
    """That of the largest number, less the largest exponent of an e4m3, 8: what is above 448 then becomes 448."""
    return torch.frexp(top).exponent - 1 - 8


POWERS = {"rceil": least_power, "floor": power_of_the_text}


def in_blocks(x: torch.Tensor, dim: int, mode: str) -> torch.Tensor:
    """What is left of a matrix with blocks along a dimension, the last of them filled up with zeros."""
    turned = x.movedim(dim, -1)
    filled = nn.functional.pad(turned, (0, -turned.shape[-1] % 32))
    blocks = filled.unflatten(-1, (filled.shape[-1] // 32, 32))
    scale = 2.0 ** POWERS[mode](blocks.abs().amax(-1, keepdim=True)).double()
    return (e4m3(blocks / scale) * scale).reshape(filled.shape)[..., : turned.shape[-1]].movedim(-1, dim)


class Defined(torch.autograd.Function):
    """The three products of one expert in fp64, each of numbers that were rounded for it, and the result in bf16."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, rounded: Rounded, of_weight: Rounded) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.rounded, ctx.of_weight = rounded, of_weight
        return (rounded(x.double(), 1) @ rounded(w.double(), 1).T).bfloat16()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, w), g = (each.double() for each in ctx.saved_tensors), gradients[0].double()
        of_x = ctx.rounded(g, 1) @ ctx.rounded(w, 0)
        of_w = ctx.of_weight(g, 0).T @ ctx.of_weight(x, 0)
        return of_x.bfloat16(), of_w.bfloat16(), None, None


def product_of(mode: str, *, exact_weight_gradient: bool = False) -> Product:
    def rounded(x: torch.Tensor, dim: int) -> torch.Tensor:
        return in_blocks(x, dim, mode)

    of_weight = unrounded if exact_weight_gradient else rounded
    return lambda x, w: Defined.apply(x, w, rounded, of_weight)  # type: ignore[no-any-return, no-untyped-call]


def unrounded(x: torch.Tensor, _dim: int) -> torch.Tensor:
    return x


def along_the_wrong_dimension(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What the format is not."""

    def rounded(each: torch.Tensor, dim: int) -> torch.Tensor:
        return in_blocks(each, 1 - dim, "rceil")

    return Defined.apply(x, w, rounded, rounded)  # type: ignore[no-any-return, no-untyped-call]


def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Products of numbers that nobody rounds."""
    return Defined.apply(x, w, unrounded, unrounded)  # type: ignore[no-any-return, no-untyped-call]


# --- single products --------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    outputs: torch.Tensor
    of_rows: torch.Tensor
    of_weight: torch.Tensor


def uneven() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, weights and a gradient in bf16. Each product sums over numbers that differ by up to 10⁶ and weigh the same:
    scales matter, those of each expert and of each block, and what goes under is missed."""
    generator = torch.Generator().manual_seed(3)

    def spread(*shape: int) -> torch.Tensor:
        return 10 ** (6 * torch.rand(*shape, generator=generator) - 3)

    rows, wide, out, number = spread(sum(COUNTS), 1), spread(1, WIDE), spread(1, OUT), spread(NUMBER, 1, 1)
    factors = rows * wide, number * out.T / wide, 1 / (rows * out)
    made = [(factor * torch.randn(factor.shape, generator=generator)).bfloat16() for factor in factors]
    return made[0], made[1], made[2]


def plan(**settings: object) -> QuantizationPlan:
    return QuantizationPlan.model_validate(
        {
            "recipe_name": "mxfp8",
            "quant_converters": ["quantize.moe.mx"],
            "extra_args": {"emulate": True, **settings},
        }
    )


def converted(module: nn.Module, **settings: object) -> Any:
    apply_low_precision(nn.ModuleDict({"experts": module}), plan(**settings))
    return module


def qwen() -> nn.Module:
    return Qwen3MoeExperts(Qwen3MoeConfig(hidden_size=WIDE, moe_intermediate_size=32, num_experts=NUMBER))


def measured(*, transposed: bool, **settings: object) -> Measured:
    """By the product that a plan gives to a module of experts."""
    product = getattr(converted(qwen(), **settings), experts._PRODUCT)
    rows, weight, gradient = (each.requires_grad_() for each in uneven())
    given = weight
    if transposed:
        given = weight.transpose(1, 2).contiguous()
    outputs = product(rows, given, torch.tensor(COUNTS), transposed=transposed)
    return Measured(outputs, *torch.autograd.grad(outputs, [rows, weight], gradient))


def expected(product: Product) -> Measured:
    """One expert after the other."""
    rows, weight, gradient = (each.requires_grad_() for each in uneven())
    parts = zip(rows.split(COUNTS), weight, strict=True)
    outputs = torch.cat([product(own, its) for own, its in parts])
    return Measured(outputs, *torch.autograd.grad(outputs, [rows, weight], gradient))


def errors(found: Measured, reference: Measured) -> Iterator[float]:
    """Of each product of each expert, in parts of its size."""
    of_experts = zip(found.of_weight, reference.of_weight, strict=True)
    pairs = [*zip(found.outputs.split(COUNTS), reference.outputs.split(COUNTS), strict=True)]
    pairs += [*zip(found.of_rows.split(COUNTS), reference.of_rows.split(COUNTS), strict=True), *of_experts]
    for one, other in ((one.detach(), other.detach()) for one, other in pairs):
        if other.any():
            yield float((one.double() - other.double()).norm() / other.double().norm())
        else:
            yield float(one.count_nonzero())


TOLERANCE = 2**-8
"""A bf16 is off by as much, at most."""


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("mode", POWERS)
def test_products_are_those_of_the_definition(mode: str, transposed: bool) -> None:
    found = measured(transposed=transposed, scale_calculation_mode=mode)
    assert max(errors(found, expected(product_of(mode)))) < TOLERANCE
    # The comparison tells what is rounded from what is not, and one way to round from another.
    others = {other: product_of(other) for other in POWERS if other != mode}
    for other in (*others.values(), plain, along_the_wrong_dimension):
        assert max(errors(found, expected(other))) > 3 * TOLERANCE


def test_the_gradient_of_the_weight_is_exact_where_it_is_asked_for() -> None:
    found = measured(transposed=False, wgrad_with_hp=True)
    assert max(errors(found, expected(product_of("rceil", exact_weight_gradient=True)))) < TOLERANCE
    assert max(errors(found, expected(product_of("rceil")))) > 3 * TOLERANCE


def test_blocks_begin_anew_with_each_expert() -> None:
    """As if each expert were alone: rows of a neighbour, which are larger, change no scale."""
    found = measured(transposed=False)
    product = getattr(converted(qwen()), experts._PRODUCT)
    rows, weight, gradient = uneven()
    ends = torch.tensor([0, *COUNTS]).cumsum(0).tolist()
    for expert, (begin, end) in enumerate(pairwise(ends)):
        own, its = rows[begin:end].clone().requires_grad_(), weight[expert : expert + 1].clone().requires_grad_()
        outputs = product(own, its, torch.tensor([end - begin]))
        of_own, of_its = torch.autograd.grad(outputs, [own, its], gradient[begin:end])
        assert torch.equal(outputs, found.outputs[begin:end])
        assert torch.equal(of_own, found.of_rows[begin:end]) and torch.equal(of_its[0], found.of_weight[expert])


def test_no_rows_at_all_are_a_gradient_of_zeros() -> None:
    product = getattr(converted(qwen()), experts._PRODUCT)
    rows, weight = torch.zeros(0, WIDE, requires_grad=True), torch.ones(NUMBER, OUT, WIDE, requires_grad=True)
    outputs = product(rows, weight, torch.zeros(NUMBER, dtype=torch.long))
    assert outputs.shape == (0, OUT) and outputs.dtype == torch.float32
    of_rows, of_weight = torch.autograd.grad(outputs.sum(), [rows, weight])
    assert of_rows.shape == rows.shape and not of_weight.any() and of_weight.shape == weight.shape


def test_groups_are_filled_up_with_zeros_and_none_is_empty() -> None:
    """Kernels take groups of multiples of 128 rows, and on B200 give the weight of an empty one a gradient."""
    filled = FilledGroups.of(torch.tensor(COUNTS), sum(COUNTS))
    assert filled.ends_G.tolist() == [128, 256, 512, 640, 768] and filled.ends_G.dtype == torch.int32
    assert filled.length >= 768 and filled.length % 128 == 0
    begins = {0: 37, 256: 131, 512: 1, 640: 64}
    places = [begin + row for begin, count in begins.items() for row in range(count)]
    whole = torch.zeros(filled.length)
    whole[places] = torch.arange(1.0, 1 + sum(COUNTS))
    assert torch.equal(filled.rows(torch.arange(1.0, 1 + sum(COUNTS))), whole)


@pytest.mark.parametrize("counts", [[128, 128], [129, 127], [1, 255], [0, 256], [0, 0]])
def test_there_is_room_for_all_groups(counts: list[int]) -> None:
    filled = FilledGroups.of(torch.tensor(counts), sum(counts))
    assert int(filled.ends_G[-1]) <= filled.length


# --- whole experts ----------------------------------------------------------------------------------------------------


def gpt_oss() -> nn.Module:
    """Biased, transposed, gate and up interleaved."""
    return GptOssExperts(GptOssConfig(hidden_size=WIDE, intermediate_size=32, num_local_experts=NUMBER))


def nemotron() -> nn.Module:
    """Without a gate."""
    return NemotronHExperts(NemotronHConfig(hidden_size=WIDE, moe_intermediate_size=32, n_routed_experts=NUMBER))


def one_by_one(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What transformers documents of such experts, with the defined product."""
    product, whole = product_of("rceil"), torch.zeros_like(hidden)
    names = [("gate_up_proj", "up_proj")[not module.has_gate], "down_proj"]

    def linear(rows: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        weight = getattr(module, name)[expert]
        made = product(rows, weight.T if module.is_transposed else weight)
        return made + getattr(module, f"{name}_bias")[expert] if module.has_bias else made

    for expert in range(NUMBER):
        token, choice = (chosen == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        inner = linear(hidden[token], names[0], expert)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        made = linear(inner, names[1], expert) * weights[token, choice, None]
        whole = whole.index_add(0, token, made)
    return whole


@pytest.mark.parametrize("make", [qwen, gpt_oss, nemotron])
def test_whole_experts_are_those_of_the_definition(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module: Any = make().bfloat16()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    hidden = torch.randn(83, WIDE, dtype=torch.bfloat16, requires_grad=True)
    logits = torch.randn(83, NUMBER - 1)  # the last expert gets nothing
    weights, chosen = logits.softmax(-1).topk(2)
    weights = weights.bfloat16().requires_grad_()
    leaves = [hidden, weights, *module.parameters()]
    reference = one_by_one(module, hidden, chosen, weights)
    gradient = torch.randn_like(reference)
    wanted = [reference, *torch.autograd.grad(reference, leaves, gradient)]
    module.config._experts_implementation = "eager"
    exact = module(hidden, chosen, weights)
    exacts = [exact, *torch.autograd.grad(exact, leaves, gradient)]
    found = converted(module)(hidden, chosen, weights)
    founds = [found, *torch.autograd.grad(found, leaves, gradient)]
    for own, other, unlike in zip(founds, wanted, exacts, strict=True):
        size = other.double().norm()
        assert float((own.double() - other.double()).norm() / size) < 0.01
        assert float((own.double() - unlike.double()).norm() / size) > 0.02 or other.dim() < 3
