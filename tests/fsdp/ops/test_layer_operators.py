"""Compiled norms, rotary embeddings and gates compute what transformers' own modules compute, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mindspeed_mm import ensure_torchvision
from mindspeed_mm.fsdp.ops import layer_operators
from mindspeed_mm.fsdp.ops.layer_operators import (
    compiled_gate,
    compiled_norm,
    compiled_rotary,
    graph_runs,
    plain_gate,
    plain_norm,
    plain_rotary,
)

ensure_torchvision()
TOLERANCES = {torch.float32: {"rtol": 2e-6, "atol": 2e-6}, torch.float64: {"rtol": 1e-12, "atol": 1e-12}}
Inputs = dict[str, Tensor]


def norm_of_llama(dtype: torch.dtype) -> tuple[Inputs, Callable[..., Any], Callable[..., Any]]:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    module = LlamaRMSNorm(24, eps=1e-5)
    inputs = {"x": torch.randn(2, 3, 5, 24), "weight": torch.randn(24)}
    return (
        inputs,
        lambda x, weight: torch.func.functional_call(module, {"weight": weight}, (x,)),
        lambda x, weight: compiled_norm(x, weight, 1e-5, 0.0, True),
    )


def norm_of_gemma(dtype: torch.dtype) -> tuple[Inputs, Callable[..., Any], Callable[..., Any]]:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    module = Gemma3RMSNorm(24, eps=1e-6)
    inputs = {"x": torch.randn(2, 7, 24), "weight": torch.randn(24)}
    return (
        inputs,
        lambda x, weight: torch.func.functional_call(module, {"weight": weight}, (x,)),
        lambda x, weight: compiled_norm(x, weight, 1e-6, 1.0, False),
    )


def rotary_of_llama(dtype: torch.dtype) -> tuple[Inputs, Callable[..., Any], Callable[..., Any]]:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    angles = torch.randn(2, 5, 4).repeat(1, 1, 2)
    inputs = {"q": torch.randn(2, 4, 5, 8), "k": torch.randn(2, 2, 5, 8), "cos": angles.cos(), "sin": angles.sin()}
    return inputs, apply_rotary_pos_emb, compiled_rotary


def gate_of_qwen(dtype: torch.dtype) -> tuple[Inputs, Callable[..., Any], Callable[..., Any]]:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    module: Any = Qwen3MLP(Qwen3Config(hidden_size=6, intermediate_size=6))
    for name in ("gate_proj", "up_proj", "down_proj"):
        setattr(module, name, nn.Identity())
    return (
        {"gate": torch.randn(2, 5, 6)},
        lambda gate: module(gate),
        lambda gate: compiled_gate(gate, gate),
    )


ALWAYS = ((norm_of_llama, torch.float32), (rotary_of_llama, torch.float64))
CASES = [
    pytest.param(case, dtype, marks=() if (case, dtype) in ALWAYS else pytest.mark.slow)
    for case in (norm_of_llama, norm_of_gemma, rotary_of_llama, gate_of_qwen)
    for dtype in TOLERANCES
]
"""Making the kernels of one takes seconds."""


def results(compute: Callable[..., Any], inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """Outputs, and gradients of a sum of their products with fixed numbers."""
    given = {name: value.to(dtype).requires_grad_() for name, value in inputs.items()}
    outputs = compute(**given)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(5)
    torch.autograd.backward(outputs, [torch.randn(each.shape, generator=generator).to(dtype) for each in outputs])
    found = {f"output {place}": each.detach() for place, each in enumerate(outputs)}
    for name, value in given.items():
        assert value.grad is not None
        found[f"gradient of {name}"] = value.grad
    return found


@pytest.mark.parametrize(("case", "dtype"), CASES)
def test_it_computes_what_transformers_computes(case: Callable[..., Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs, theirs, ours = case(dtype)
    if dtype is torch.float64 and case in (norm_of_llama, norm_of_gemma):  # theirs rounds to fp32 inside
        offset, rounds_first, eps = (0.0, True, 1e-5) if case is norm_of_llama else (1.0, False, 1e-6)
        theirs = in_double(eps, offset)
        ours = lambda x, weight: compiled_norm(x, weight, eps, offset, rounds_first)  # noqa: E731
    before = graph_runs().total()
    found, expected = results(ours, inputs, dtype), results(theirs, inputs, dtype)
    assert graph_runs().total() == before + 1
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **TOLERANCES[dtype])


def in_double(eps: float, offset: float) -> Callable[..., Any]:
    """The formula of an RMS norm, in torch's own function."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (x.shape[-1],), weight + offset, eps)

    return norm


def test_no_graph_is_cut_and_no_number_becomes_an_input() -> None:
    """`fullgraph` raises where a function cannot be traced as a whole."""
    seen: list[int] = []

    def backend(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
        seen.append(sum(isinstance(each, Tensor) for each in inputs))
        return graph.forward  # type: ignore[no-any-return]

    whole = {"backend": backend, "fullgraph": True}
    x, weight, q, angle = torch.randn(3, 8), torch.randn(8), torch.randn(2, 4, 3, 8), torch.randn(2, 3, 8)
    torch.compile(lambda: plain_norm(x, weight, 1e-6, 1.0, True), **whole)()
    torch.compile(lambda: plain_rotary(q, angle, angle), **whole)()
    torch.compile(lambda: plain_gate(q, q), **whole)()
    assert seen == [2, 2, 1]


def test_changing_sizes_compile_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded rows of fifty lengths, hidden states and heads: one graph for each width."""
    backend = layer_operators._BACKENDS
    for each in backend.values():
        monkeypatch.setattr(each, "_name", "aot_eager")
    torch._dynamo.reset()
    weight, narrow = nn.Parameter(torch.randn(20)), nn.Parameter(torch.randn(6))
    before = {name: each.graphs for name, each in backend.items()}
    runs = graph_runs()
    for length in range(5, 55):
        hidden, heads = torch.randn(2, length, 20, requires_grad=True), torch.randn(2, 4, length, 6, requires_grad=True)
        angle = torch.randn(2, length, 6)
        turned, _ = compiled_rotary(heads, heads[:, :2], angle, angle)
        total = compiled_norm(hidden, weight, 1e-6, 0.0, True).sum()
        total = total + compiled_norm(heads, narrow, 1e-6, 0.0, True).sum() + turned.sum()
        (total + compiled_gate(hidden, hidden).sum()).backward()
    made = {name: each.graphs - before[name] for name, each in backend.items()}
    assert made["norm"] <= 2 and made["rotary"] <= 1 and made["gate"] <= 1
    assert graph_runs() - runs == {"norm": 100, "rotary": 50, "gate": 50}


def test_inside_of_another_graph_it_is_a_part_of_it() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    before = graph_runs()
    around = torch.compile(lambda x: compiled_norm(x, weight, 1e-6, 0.0, True) + 1, backend="eager", fullgraph=True)
    torch.testing.assert_close(around(x), plain_norm(x, weight, 1e-6, 0.0, True) + 1)
    assert graph_runs() == before
