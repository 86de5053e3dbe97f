"""The routers' balancing term equals transformers' formula, whole and in shares."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.features.memory.recompute import recompute_modules
from mindspeed_mm.fsdp.loss.objectives import BatchTokens
from mindspeed_mm.fsdp.loss.router_aux import (
    TERM,
    RouterLogits,
    SavedOnHost,
    WithRouterAux,
    find_routers,
    leave_router_loss_to_us,
    share_of,
    sum_routers,
)
from mindspeed_mm.fsdp.utils.host_copies import HostCopies
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

prepare_for_transformers()

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402  (the guard comes first)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func  # noqa: E402

LAYERS, EXPERTS, CHOICES = 3, 5, 2


def balance_share(layers: Any, choices: Any, real_T: Any, groups: Any = ()) -> torch.Tensor:
    return share_of(sum_routers(layers, choices, real_T), groups)


def logits(tokens: int, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [(3 * torch.randn(tokens, EXPERTS)).requires_grad_() for _ in range(LAYERS)]


@pytest.mark.parametrize("padding", [0, 4])
def test_equals_transformers_formula(padding: int) -> None:
    layers, mask = logits(12), torch.ones(2, 6)
    mask.view(-1)[12 - padding :] = 0
    expected = load_balancing_loss_func(tuple(layers), EXPERTS, CHOICES, mask if padding else None)
    real = mask.reshape(-1) != 0
    share = balance_share(layers, [CHOICES] * LAYERS, real if padding else None)
    torch.testing.assert_close(share, expected * (12 - padding))
    for own, other in zip(
        torch.autograd.grad(share, layers), torch.autograd.grad(expected * (12 - padding), layers), strict=True
    ):
        torch.testing.assert_close(own, other)


def test_shares_of_ranks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks by hand: each reduces its statistics to those of both."""
    both, parts = [logits(12), logits(12)], (slice(0, 5), slice(5, 12))
    whole = balance_share(both[0], [CHOICES] * LAYERS, None)
    own: list[torch.Tensor] = []
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, group: own.append(tensor.clone()))
    for part in parts:
        balance_share([layer[part] for layer in both[1]], [CHOICES] * LAYERS, None, ["group"])  # type: ignore[list-item]
    total = own[0] + own[1]
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, group: tensor.copy_(total))
    shares = [
        balance_share([layer[part] for layer in both[1]], [CHOICES] * LAYERS, None, ["group"])  # type: ignore[list-item]
        for part in parts
    ]
    torch.testing.assert_close(shares[0] + shares[1], whole)
    gradients = torch.autograd.grad(shares[0] + shares[1], both[1])
    for found, expected in zip(gradients, torch.autograd.grad(whole, both[0]), strict=True):
        torch.testing.assert_close(found, expected)


def test_without_a_real_token_it_is_zero() -> None:
    assert balance_share(logits(4), [CHOICES] * LAYERS, torch.zeros(4, dtype=torch.bool)).item() == 0


def tiny_model(**settings: Any) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts=EXPERTS, num_experts_per_tok=CHOICES,
        initializer_range=0.5, **settings,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


class Nothing:
    """An objective whose own term is zero."""

    def prepare(self, batch: Any, *, training: bool = True) -> Any:
        return batch

    def tokens(self, batch: Any) -> BatchTokens:
        return BatchTokens(int(batch["attention_mask"].sum()), 3)

    def count(self, batches: Any) -> dict[str, int]:
        return {"loss": 3 * len(batches)}

    def terms(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": model(**batch).logits.sum() * 0}


def batch_of(padding: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 7 - padding :] = 0
    return {"input_ids": torch.arange(14).reshape(2, 7) % 40, "attention_mask": mask}


@pytest.mark.parametrize("recompute", [False, True])
def test_term_of_a_model_equals_its_own_loss(recompute: bool) -> None:
    reference, model = tiny_model(output_router_logits=True), tiny_model()
    if recompute:
        recompute_modules(model, ["model.layers.0", "model.layers.1"])
    objective = WithRouterAux(Nothing(), model, 0.25)
    batch = batch_of(padding=3)
    expected = reference(**batch).aux_loss * 0.25
    expected.backward()
    terms, count = objective.terms(model, batch), objective.count([batch])
    assert count == {"loss": 3, TERM: 11}
    (terms[TERM] / count[TERM] + terms["loss"]).backward()
    torch.testing.assert_close((terms[TERM] / count[TERM]).detach(), expected.detach())
    for (name, own), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        found = own.grad if own.grad is not None else torch.zeros_like(own)
        wanted = other.grad if other.grad is not None else torch.zeros_like(other)
        torch.testing.assert_close(found, wanted, msg=name)


def test_routers_are_found_and_nothing_is_kept_outside() -> None:
    model = tiny_model()
    assert [(type(module).__name__, index) for module, index in find_routers(model)] == [("Qwen3MoeTopKRouter", 0)] * 2
    routers = RouterLogits(model)
    assert routers.choices == [CHOICES, CHOICES]
    with routers.kept() as found:
        model(input_ids=torch.arange(4)[None])
    model(input_ids=torch.arange(4)[None])
    assert [tuple(layer.shape) for layer in found] == [(4, EXPERTS)] * 2


def test_a_model_without_routers_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"features\.loss_cfg\.router_aux_loss_coef  Linear names no router"):
        RouterLogits(nn.Linear(2, 2))


def test_a_router_that_does_not_say_how_many_it_chooses_is_an_error() -> None:
    model = tiny_model()
    for router, _ in find_routers(model):
        del router.top_k
    with pytest.raises(ConfigError, match="does not say how many experts it chooses"):
        RouterLogits(model)


def test_the_model_s_own_coefficient_is_not_used() -> None:
    model = tiny_model(output_router_logits=True, router_aux_loss_coef=7.0)
    leave_router_loss_to_us(model)
    batch = batch_of(padding=0)
    output = model(**batch, labels=batch["input_ids"])
    assert output.aux_loss is None
    leave_router_loss_to_us(nn.ModuleList([SimpleModel()]))


class SimpleModel(nn.Module):
    config = SimpleNamespace(text_config=None)


@pytest.mark.parametrize("padding", [0, 4])
def test_statistics_on_the_host_change_no_bit(padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    for name in ("to_host", "to_device"):
        real = getattr(HostCopies, name)
        monkeypatch.setattr(HostCopies, name, lambda *args, name=name, real=real: moved.append(name) or real(*args))
    real_T = torch.arange(12) < 12 - padding
    found = []
    for saving in (nullcontext(), SavedOnHost()()):
        layers = logits(12)
        with saving:
            share = balance_share(layers, [CHOICES] * LAYERS, real_T)
        assert len(moved) == len([name for name in moved if name == "to_host"])
        found.append([share.detach(), *torch.autograd.grad(share, layers)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert moved.count("to_host") >= LAYERS and moved.count("to_device") == moved.count("to_host")


def test_nothing_is_moved_where_no_gradient_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostCopies, "to_host", lambda *_: pytest.fail("moved"))
    with torch.no_grad(), SavedOnHost()():
        balance_share(logits(12), [CHOICES] * LAYERS, None)
