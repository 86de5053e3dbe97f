"""Linear layer and cross-entropy in slices against F.cross_entropy on whole logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_mm.fsdp.ops import linear_cross_entropy as ops
from mindspeed_mm.fsdp.ops.linear_cross_entropy import LossPlan, linear_cross_entropy, recomputed_cross_entropy

ROWS, HIDDEN, WORDS = 23, 8, 37
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}
SCALE = 1 / 7
"""Stands for the denominator of the step."""


def soft_cap(logits: Tensor) -> Tensor:
    return 3 * torch.tanh(logits / 3)


def inputs(
    dtype: torch.dtype = torch.float64,
    bias: bool = True,
    weights: bool = False,
    sizes: tuple[int, int, int] = (ROWS, HIDDEN, WORDS),
) -> dict[str, Any]:
    rows, width, words = sizes
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return {
        "hidden": draw(rows, width),
        "weight": draw(words, width),
        "bias": draw(words) if bias else None,
        "targets": torch.randint(0, words, (rows,), generator=generator),
        "weights": torch.rand(rows, generator=generator, dtype=torch.float64) if weights else None,
    }


def whole(given: dict[str, Any], plan: LossPlan) -> Tensor:
    """Loss and z-loss by the formulas, from all logits, in fp64."""
    logits = F.linear(given["hidden"].double(), given["weight"].double(), _double(given["bias"]))
    logits = plan.behind(logits) if plan.behind else logits
    losses = F.cross_entropy(logits, given["targets"], reduction="none")
    losses = losses + plan.z_loss_coef * logits.exp().sum(dim=1).log() ** 2
    return (losses if given["weights"] is None else losses * given["weights"]).sum() * SCALE


def sliced(given: dict[str, Any], plan: LossPlan) -> Tensor:
    sums = linear_cross_entropy(
        given["hidden"], given["weight"], given["targets"], plan, bias_V=given["bias"], weights_N=given["weights"]
    )
    return (sums.loss + sums.z_loss) * SCALE


def recomputed(given: dict[str, Any], plan: LossPlan) -> Tensor:
    def logits_of(hidden: Tensor) -> Tensor:
        return F.linear(hidden, given["weight"], given["bias"])

    sums = recomputed_cross_entropy(logits_of, given["hidden"], given["targets"], plan, weights_N=given["weights"])
    return (sums.loss + sums.z_loss) * SCALE


def _double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()


def parameters(given: dict[str, Any]) -> list[Tensor]:
    return [given[name] for name in ("hidden", "weight", "bias") if given[name] is not None]


def differ(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("way", [sliced, recomputed])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(
    "plan", [LossPlan(5), LossPlan(ROWS, 0.01), LossPlan(1000, 0.01, soft_cap)], ids=["5 rows", "z-loss", "soft-capped"]
)
def test_equals_whole_logits(
    way: Callable[..., Tensor], dtype: torch.dtype, bias: bool, weights: bool, plan: LossPlan
) -> None:
    given = inputs(dtype, bias, weights)
    loss, expected = way(given, plan), whole(given, plan)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert differ(loss, expected) < TOLERANCES[dtype]
    found = torch.autograd.grad(loss, parameters(given))
    for own, other in zip(found, torch.autograd.grad(expected, parameters(given)), strict=True):
        assert own.dtype == dtype
        assert differ(own, other) < TOLERANCES[dtype]


def test_a_wrong_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last slice's product with the hidden states is left out."""
    real = ops._add_product
    monkeypatch.setattr(ops, "_add_product", lambda *args: real(*args) if len(args[1]) == 5 else None)
    given, plan = inputs(), LossPlan(5)
    found = torch.autograd.grad(sliced(given, plan), parameters(given))
    expected = torch.autograd.grad(whole(given, plan), parameters(given))
    assert differ(found[1], expected[1]) > 1e-3


def test_several_backward_passes_through_one_graph() -> None:
    given = inputs(weights=True)
    loss = sliced(given, LossPlan(5, 0.1, soft_cap))
    first = torch.autograd.grad(loss, parameters(given), retain_graph=True)
    for _ in range(2):
        again = torch.autograd.grad(loss, parameters(given), retain_graph=True)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_second_derivatives() -> None:
    """Of few numbers, each of which is changed by itself: in three slices, of which the last is not full."""
    given, plan = inputs(weights=True, sizes=(11, 3, 13)), LossPlan(5, 0.1, soft_cap)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return sliced(given | {"hidden": hidden, "weight": weight, "bias": bias}, plan)

    assert torch.autograd.gradgradcheck(loss, parameters(given))


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_no_gradient_is_formed_of_what_needs_none(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    formed: list[tuple[bool, ...]] = []
    real = ops._pass
    monkeypatch.setattr(ops, "_pass", lambda inputs, wanted: formed.append(wanted) or real(inputs, wanted))
    given = inputs()
    given[frozen].requires_grad_(False)
    left = [tensor for tensor in parameters(given) if tensor.requires_grad]
    found = torch.autograd.grad(sliced(given, LossPlan(5)), left)
    for own, other in zip(found, torch.autograd.grad(whole(given, LossPlan(5)), left), strict=True):
        assert differ(own, other) < 1e-12
    assert formed == [tuple(name != frozen for name in ("hidden", "weight", "bias"))]


def test_only_the_loss_where_no_gradient_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_add_product", lambda *_: pytest.fail("a gradient was formed"))
    given = inputs()
    with torch.no_grad():
        loss = sliced(given, LossPlan(5, 0.1))
    assert not loss.requires_grad
    assert differ(loss, whole(given, LossPlan(5, 0.1))) < 1e-12


@pytest.mark.parametrize("way", [sliced, recomputed])
def test_no_rows_give_zero_and_zero_gradients(way: Callable[..., Tensor]) -> None:
    given = inputs()
    none = given | {"hidden": given["hidden"][:0], "targets": given["targets"][:0]}
    loss = way(none, LossPlan(5, 0.1))
    loss.backward()
    assert loss.item() == 0
    assert all(tensor.grad is not None and not tensor.grad.any() for tensor in (given["weight"], given["bias"]))


def test_unlikely_targets_have_finite_losses() -> None:
    """Probabilities below the smallest fp32 number."""
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[200.0], [-200.0]])
    sums = linear_cross_entropy(hidden, weight, torch.tensor([1]), LossPlan(1))
    assert sums.loss.item() == 400.0


def test_slices_add_up_in_fp32() -> None:
    """Sums of many slices in bf16 would stand still."""
    hidden = torch.ones(4096, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(4096, dtype=torch.long)
    linear_cross_entropy(hidden, weight, targets, LossPlan(1)).loss.backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [-2048.0, 2048.0]


def test_a_simulation_counts_the_rows_of_the_device_that_it_is_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_WIDE_NUMBERS", {"cpu": 2 * WORDS})
    given, taken = inputs(), list[int]()
    softmax = torch.softmax

    def noted(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        taken.append(len(logits))
        return softmax(logits, *args, **kwargs)

    monkeypatch.setattr(torch, "softmax", noted)
    for device in ("cpu", "cuda"):
        with ops.as_computed_on(device):
            linear_cross_entropy(given["hidden"], given["weight"], given["targets"], LossPlan(ROWS))
    assert taken == [2] * (ROWS // 2) + [1, ROWS]
