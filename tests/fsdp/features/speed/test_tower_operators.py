"""Towers turn by fewer operations to the same bits, and their norms by torch's kernel to the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mindspeed_mm.fsdp.features.speed import tower_operators
from mindspeed_mm.fsdp.features.speed.tower_operators import apply_tower_operators, fit_tower
from mindspeed_mm.fsdp.models.structure.towers import find_towers, handed_on
from mindspeed_mm.fsdp.ops import rotary_turn
from mindspeed_mm.fsdp.ops.forward_stack import describe_forwards
from tests.fsdp.models.test_towers import WITH_MEDIA
from tests.helpers.packed_families import InDouble

Results = dict[str, torch.Tensor]
SIZES = {"equal": [(4, 4), (4, 4)], "different": [(4, 4), (2, 4)]}
"""Rows and columns of patches."""
FAMILIES = {"gemma4": "Gemma4VisionAttention", "omni": "Qwen2_5OmniVisionAttention", "mistral3": "PixtralAttention"}


def pictures(name: str, sizes: Sequence[tuple[int, int]], dtype: torch.dtype) -> tuple[Any, ...]:
    """What `get_image_features` of a family takes."""
    draw = torch.Generator().manual_seed(0)
    if name == "gemma4":  # rows of 16 patches; those that a picture lacks have places of −1
        pixels = torch.rand(len(sizes), 16, 3 * 4 * 4, generator=draw, dtype=torch.float64)
        places = torch.full((len(sizes), 16, 2), -1)
        for place, (rows, columns) in zip(places, sizes, strict=True):
            place[: rows * columns] = torch.cartesian_prod(torch.arange(columns), torch.arange(rows))
        return pixels.to(dtype), places
    if name == "mistral3":
        side = WITH_MEDIA[name].build().config.vision_config.patch_size
        pixels = torch.randn(len(sizes), 3, 4 * side, 4 * side, generator=draw, dtype=torch.float64)
        return pixels.to(dtype), torch.tensor([(rows * side, columns * side) for rows, columns in sizes])
    vision = WITH_MEDIA[name].build().config.vision_config
    numbers = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    patches = sum(rows * columns for rows, columns in sizes)
    pixels = torch.randn(patches, numbers, generator=draw, dtype=torch.float64)
    return pixels.to(dtype), torch.tensor([[1, rows, columns] for rows, columns in sizes])


def outcome(model: Any, given: tuple[Any, ...]) -> Results:
    """Features, and gradients of a bounded function of them."""
    getter = "get_image_features"
    holder = model.model if hasattr(model.model, getter) else model
    found = handed_on(getattr(holder, getter)(*given, return_dict=True))
    sum((each.sum() / 3).tanh() for each in found).backward()  # type: ignore[union-attr]
    features = {f"features {place}": each.detach() for place, each in enumerate(found)}
    return features | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def built(name: str, dtype: torch.dtype) -> Any:
    return WITH_MEDIA[name].build(attention="sdpa").to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_turning_keeps_every_bit(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(name, dtype)
    given = pictures(name, SIZES["different"], dtype)
    expected = outcome(model, given)
    model.zero_grad()
    apply_tower_operators(model, norms=False)
    assert FAMILIES[name] in describe_forwards(model)
    calls: list[int] = []
    real = tower_operators.turned
    monkeypatch.setattr(
        tower_operators, "turned", lambda *args, **kwargs: calls.append(kwargs["parts"]) or real(*args, **kwargs)
    )
    found = outcome(model, given)
    assert calls == [2 if name == "gemma4" else 1] * 2 * 2  # queries and keys of two blocks
    assert found.keys() == expected.keys()
    assert [key for key, each in expected.items() if not torch.equal(found[key], each)] == []


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", FAMILIES)
def test_norms_give_the_librarys_numbers(name: str, sizes: str) -> None:
    model, given = built(name, torch.float64), pictures(name, SIZES[sizes], torch.float64)
    with InDouble():
        expected = outcome(model, given)
    model.zero_grad()
    apply_tower_operators(model, norms=True)
    assert "RMSNorm" in describe_forwards(model)
    with InDouble():
        found = outcome(model, given)
    assert found.keys() == expected.keys()
    whole = max(float(each.norm()) for each in expected.values())
    for key, each in expected.items():
        assert float((found[key] - each).norm()) <= 1e-15 * (float(each.norm()) + whole), key


@pytest.mark.parametrize("with_scale", [True, False])
def test_a_norm_by_a_power_is_one_by_a_root(with_scale: bool) -> None:
    """Gemma's raises to the power −½, which rounds otherwise in the last place."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

    norm = Gemma4RMSNorm(32, with_scale=with_scale).double()
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    results = []
    for _ in range(2):
        x = torch.linspace(-2, 3, 320, dtype=torch.float64).view(10, 32).requires_grad_()
        with InDouble():
            output = norm(x)
            leaves = [x, *norm.parameters()]
            results.append([output, *torch.autograd.grad(output.square().sum() + output.sum(), leaves)])
        fit_tower(norm, norms=True)
    assert describe_forwards(norm)
    for one, other in zip(*results, strict=True):
        assert float((one - other).detach().norm()) <= 1e-15 * float(one.detach().norm())


def test_heads_of_which_a_part_turns_stay_with_the_library() -> None:
    name = "minimax_m3_vl"
    expected, given = built(name, torch.float32), WITH_MEDIA[name].samples()[3]["media"][0].tensors
    model = built(name, torch.float32)
    apply_tower_operators(model, norms=False)
    assert find_towers(model)
    values = tuple(value.float() if value.is_floating_point() else value for value in given.values())
    found, wanted = outcome(model, values), outcome(expected, values)
    assert all(torch.equal(found[key], each) for key, each in wanted.items())


def test_signs_are_made_once_for_all_layers() -> None:
    sin = torch.randn(5, 8)
    first = rotary_turn.turned(torch.randn(5, 2, 8), sin, sin, heads_dim=1, parts=1, is_wide=False)
    kept = sin._mm_signed_sines
    rotary_turn.turned(first, sin, sin, heads_dim=1, parts=1, is_wide=False)
    assert sin._mm_signed_sines is kept
    rotary_turn.turned(first, sin, sin, heads_dim=1, parts=2, is_wide=False)
    assert sin._mm_signed_sines is not kept


def test_compiled_layers_keep_the_librarys_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler makes one kernel of it, and cannot look at what is kept on tensors."""
    model = built("omni", torch.float32)
    given = pictures("omni", SIZES["equal"], torch.float32)
    expected = outcome(model, given)
    model.zero_grad()
    apply_tower_operators(model, norms=False)
    monkeypatch.setattr(tower_operators, "turned", None)
    torch._dynamo.reset()
    for block in model.get_submodule(next(each.module for each in find_towers(model) if each.name == "image")).blocks:
        block.attn.forward = torch.compile(block.attn.forward, backend="eager")
    found = outcome(model, given)
    for key, each in expected.items():
        torch.testing.assert_close(found[key], each, rtol=1e-5, atol=1e-6)
