"""Our implementation of fused experts equals transformers' own loops, for each layout that they declare."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_mm.fsdp.ops.experts import ExpertsForward, fused_experts, is_fused, sort_pairs, use_own_experts
from mindspeed_mm.fsdp.ops.real_tokens import RealTokens
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

prepare_for_transformers()

from transformers import GptOssConfig, NemotronHConfig, Qwen3MoeConfig  # noqa: E402  (the guard comes first)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts  # noqa: E402
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts  # noqa: E402

WIDTH, EXPERTS, CHOICES, TOKENS = 16, 6, 2, 11


def qwen() -> nn.Module:
    config = Qwen3MoeConfig(hidden_size=WIDTH, moe_intermediate_size=8, num_experts=EXPERTS)
    return Qwen3MoeExperts(config)


def gpt_oss() -> nn.Module:
    """Biased, transposed, gate and up interleaved."""
    return GptOssExperts(GptOssConfig(hidden_size=WIDTH, intermediate_size=8, num_local_experts=EXPERTS))


def nemotron() -> nn.Module:
    """Without a gate."""
    config = NemotronHConfig(hidden_size=WIDTH, moe_intermediate_size=8, n_routed_experts=EXPERTS)
    return NemotronHExperts(config)


def filled(module: nn.Module) -> Any:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    module.double().config._experts_implementation = "eager"  # type: ignore[union-attr]
    return module


def routing() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    hidden = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    logits = torch.randn(TOKENS, EXPERTS - 1, dtype=torch.float64)  # the last expert gets nothing
    weights, chosen = logits.softmax(-1).topk(CHOICES)
    return hidden, chosen, weights.requires_grad_()


@pytest.mark.parametrize("make", [qwen, gpt_oss, nemotron])
def test_equals_the_model_s_own_loop(make: Any) -> None:
    module = filled(make())
    hidden, chosen, weights = routing()
    leaves = [hidden, weights, *module.parameters()]
    expected = module(hidden, chosen, weights)
    expected_gradients = torch.autograd.grad(expected.square().sum(), leaves)
    use_own_experts(module)
    found = module(hidden, chosen, weights)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for own, reference in zip(torch.autograd.grad(found.square().sum(), leaves), expected_gradients, strict=True):
        torch.testing.assert_close(own, reference, rtol=1e-12, atol=1e-12)


class Called(TorchDispatchMode):
    """Names of the operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("left_out", [0, 4])
def test_no_gradient_is_added_up_row_by_row(left_out: int) -> None:
    """`index_put` with `accumulate` sorts what it adds, on an accelerator; the model's own loop has it."""
    module, (hidden, chosen, weights) = filled(qwen()), routing()
    called = []
    for forward in (None, ExpertsForward()):
        if forward is not None:
            forward.without_padding = lambda ids, experts: (  # type: ignore[method-assign]
                ids.masked_fill((torch.arange(TOKENS) >= TOKENS - left_out)[:, None], experts),
                (TOKENS - left_out) * CHOICES,
            )
            use_own_experts(module, forward)
        with Called() as seen:
            module(hidden, chosen, weights).square().sum().backward()
        called.append({name for name in seen.names if "index_put" in name or "index_add" in name})
    assert called[0] and not called[1], called


def test_fused_experts_are_found_by_what_they_declare() -> None:
    model = nn.ModuleDict({"moe": nn.ModuleDict({"experts": qwen(), "gate": nn.Linear(WIDTH, EXPERTS)})})
    assert list(fused_experts(model)) == ["moe.experts"]
    assert is_fused(gpt_oss()) and is_fused(nemotron())
    other = qwen()
    other.num_experts = EXPERTS + 1
    assert not is_fused(other)


def test_padding_goes_through_no_expert() -> None:
    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = filled(qwen())

        def forward(self, hidden: Any, chosen: Any, weights: Any, attention_mask: Any = None) -> Any:
            return self.experts(hidden, chosen, weights)

    model = Caller()
    hidden, chosen, weights = routing()
    whole = model(hidden, chosen, weights)
    use_own_experts(model.experts, ExpertsForward(RealTokens(model)))
    real = torch.arange(TOKENS) < 7
    found = model(hidden, chosen, weights, attention_mask=real[None].long())
    torch.testing.assert_close(found[:7], whole[:7], rtol=1e-12, atol=1e-12)
    assert found[7:].eq(0).all()
    (gradient,) = torch.autograd.grad(found.sum(), [hidden])
    assert gradient[7:].eq(0).all() and gradient[:7].ne(0).any()
    torch.testing.assert_close(model(hidden, chosen, weights), whole, rtol=1e-12, atol=1e-12)  # no mask, no padding


def test_a_mask_of_other_tokens_is_none_of_this_module_s() -> None:
    model = nn.Identity()
    tokens = RealTokens(model)
    model.register_forward_pre_hook(lambda *_: None)
    tokens._look(model, (), {"attention_mask": torch.tensor([[1, 1, 0]])})
    assert tokens.mask(3).tolist() == [True, True, False]  # type: ignore[union-attr]
    assert tokens.mask(4) is None
    tokens._look(model, (), {"attention_mask": torch.ones(1, 1, 3, 3)})
    assert tokens.mask(3) is None


def test_pairs_are_sorted_by_expert_and_stay_in_order() -> None:
    chosen = torch.tensor([[1, 0], [3, 1], [0, 3]])
    pairs = sort_pairs(chosen, 3, number=None)  # 3: left out
    assert pairs.slots_S.tolist() == [1, 4, 0, 3]
    assert pairs.counts_E.tolist() == [2, 2, 0]
