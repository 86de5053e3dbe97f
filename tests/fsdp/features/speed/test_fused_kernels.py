"""Norms, rotary embeddings and gated units are replaced where they compute the plain formula, and nowhere else."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.features.speed import fused_kernels, fused_operators
from mindspeed_mm.fsdp.features.speed.choice import NPU, SpeedChoice
from mindspeed_mm.fsdp.features.speed.compiled_blocks import compile_modules
from mindspeed_mm.fsdp.features.speed.fused_kernels import FusedKernels, apply_fused_kernels, norm_variant
from mindspeed_mm.fsdp.features.speed.fused_operators import FusedOperators
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.structure.spec import find_blocks
from mindspeed_mm.fsdp.ops.forward_stack import describe_forwards
from mindspeed_mm.fsdp.ops.layer_operators import plain_gate, plain_norm, plain_rotary
from mindspeed_mm.fsdp.params.feature_args import CompilePlan
from tests.helpers.tiny_models import make_tiny_qwen3


def exact() -> FusedOperators:
    """What kernels compute, by plain operations."""
    return FusedOperators(
        "test",
        plain_norm,
        lambda q, k, cos, sin: (plain_rotary(q, cos, sin), plain_rotary(k, cos, sin)),
        plain_gate,
    )


def wrong(name: str) -> FusedOperators:
    """The same with one of them off."""
    right = exact()
    real = getattr(right, name)

    def off(*args: Any) -> Any:
        output = real(*args)
        return tuple(each * 1.01 for each in output) if isinstance(output, tuple) else output * 1.01

    return FusedOperators(**{**vars(right), name: off})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("tiny"))


def build(folder: Path) -> Any:
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(folder)


def outcome(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    ids = torch.randint(5, 200, (2, 9), generator=torch.Generator().manual_seed(1))
    loss = model(ids).logits.square().mean()
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.allclose(one[name], other[name], rtol=1e-5, atol=1e-8)]


def fused(model: nn.Module, monkeypatch: pytest.MonkeyPatch, operators: FusedOperators) -> nn.Module:
    monkeypatch.setattr(fused_kernels, "fused_operators", lambda _provider: operators)
    apply_fused_kernels(model, SpeedChoice("test", "a test"), is_wish=True)
    return model


def test_all_of_them_and_the_same_numbers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = build(folder)
    model = fused(build(folder), monkeypatch, exact())
    assert list(model.state_dict()) == list(plain.state_dict())
    # Two layers: two norms and two of heads each, and the last one.
    said = "9 RMS norms, 2 gated linear units, 2 rotary embeddings by test (a test)"
    assert str(facts_of(model).noted(FusedKernels)) == said
    assert differing(outcome(plain), outcome(model)) == []


@pytest.mark.parametrize("name", ["rms_norm", "rotary", "silu_mul"])
def test_each_of_them_runs(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fused(build(folder), monkeypatch, wrong(name))
    assert len(differing(outcome(build(folder)), outcome(model))) > 5


def test_on_meta_and_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are tried before they have values, and the compiler sees the replaced functions, not the library's."""
    plain = build(folder)
    model = fused(copy.deepcopy(plain).to("meta"), monkeypatch, wrong("rotary"))
    model = model.to_empty(device="cpu")
    model.load_state_dict(plain.state_dict())
    for (_, own), (_, other) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        own.copy_(other)
    eager = outcome(model)
    torch._dynamo.reset()
    compile_modules(model, CompilePlan(backend="aot_eager"), find_blocks(model))
    assert differing(eager, outcome(model)) == []
    assert differing(outcome(plain), eager)


@pytest.mark.parametrize(("heads_dim", "width"), [(1, 8), (0, 8), (2, 8), (1, 4)])
def test_a_layer_says_where_heads_stand_and_what_of_them_turns(
    heads_dim: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes whole heads in front of tokens; every other call is the library's, as Mistral's tower and
    GLM's decoder make it."""
    from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as of_parts
    from transformers.models.pixtral.modeling_pixtral import apply_rotary_pos_emb as of_wholes

    calls = []

    def rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        calls.append(cos.shape)
        return plain_rotary(q, cos, sin), plain_rotary(k, cos, sin)

    operators = FusedOperators("test", plain_norm, rotary, plain_gate)
    by_library = of_wholes if width == 8 else of_parts
    turn = fused_kernels.rotary_function(by_library, operators)
    shape = (1, 5, 3, 8) if heads_dim == 2 else (1, 3, 5, 8)
    q, k = torch.randn(shape), torch.randn(shape)
    half = torch.randn(1, 5, width // 2)
    angles = torch.cat([half, half], dim=-1)
    if heads_dim == 0:
        angles = angles[0]
    options = {} if heads_dim == 1 else {"unsqueeze_dim": heads_dim}
    found = turn(q, k, angles.cos(), angles.sin(), **options)
    for one, other in zip(found, by_library(q, k, angles.cos(), angles.sin(), **options), strict=True):
        torch.testing.assert_close(one, other)
    assert len(calls) == (width == 8 and heads_dim < 2)


class Halved(nn.Module):
    """A norm of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return plain_norm(x, self.weight, self.eps, 0.0, True) / 2


def test_variants_are_told_apart_by_what_they_compute() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    assert norm_variant(Qwen3RMSNorm(8)) == (0.0, True)
    assert norm_variant(Gemma3RMSNorm(8)) == (1.0, False)
    for other in (nn.LayerNorm(8, bias=False), Halved(), nn.Linear(8, 8, bias=False)):
        assert norm_variant(other) is None


def test_a_model_without_any_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="has no norm"):
        fused(nn.Sequential(nn.Linear(4, 4)), monkeypatch, exact())
    model = nn.Sequential(nn.Linear(4, 4))
    apply_fused_kernels(model, SpeedChoice("test", "a test"))
    assert str(facts_of(model).noted(FusedKernels)).startswith("off (the model has no norm")


def test_a_choice_of_none_changes_nothing(folder: Path) -> None:
    model = build(folder)
    apply_fused_kernels(model, SpeedChoice("", "a reason"))
    assert describe_forwards(model) == ""
    assert str(facts_of(model).noted(FusedKernels)) == "off (a reason)"


def test_models_on_meta_are_looked_at_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel needs data, which a forecast has not."""

    def kernel(*_: Any) -> Any:
        raise AssertionError("launched")

    monkeypatch.setattr(fused_operators, "_of_liger", lambda: FusedOperators("liger", kernel, kernel, kernel))
    operators = fused_operators.fused_operators("liger")
    x, q, angle = (torch.zeros(*shape, device="meta") for shape in ((3, 8), (2, 4, 3, 8), (2, 3, 8)))
    assert operators.rms_norm(x, x[0], 1e-6, 0.0, True).shape == x.shape
    assert operators.rotary(q, q, angle, angle)[1].shape == q.shape
    assert operators.silu_mul(x, x).shape == x.shape


def test_operators_of_an_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch_npu is called with, by stand-ins that compute what its manual says."""
    fakes = {
        "npu_rms_norm": lambda x, weight, epsilon: (plain_norm(x, weight, epsilon, 0.0, True), None),
        "npu_rotary_mul": lambda x, cos, sin: plain_rotary(x, cos[:, 0], sin[:, 0]),
        "npu_swiglu": lambda x, dim: plain_gate(*x.chunk(2, dim)),
    }
    monkeypatch.setattr(fused_operators, "npu_operator", lambda name, key: fakes[name])
    operators, expected = fused_operators.fused_operators(NPU), exact()
    x, weight = torch.randn(3, 8), torch.randn(8)
    assert torch.equal(operators.rms_norm(x, weight, 1e-6, 1.0, False), plain_norm(x, weight + 1, 1e-6, 0.0, True))
    q, k, angle = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8), torch.randn(2, 3, 8)
    found = operators.rotary(q, k, angle.cos(), angle.sin())
    assert all(map(torch.equal, found, expected.rotary(q, k, angle.cos(), angle.sin())))
    torch.testing.assert_close(operators.silu_mul(q, q + 1), expected.silu_mul(q, q + 1))
