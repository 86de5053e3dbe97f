"""The operators that compute norms, rotary embeddings and gated linear units in one kernel each: liger's on CUDA,
torch_npu's on NPUs, or our own by torch.compile. All are of installed packages: nothing is fetched.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_mm.fsdp.features.speed.choice import COMPILED, FUSED_KEY, LIGER, NPU
from mindspeed_mm.fsdp.ops.layer_operators import (
    compiled_gate,
    compiled_norm,
    compiled_rotary,
    plain_gate,
    plain_norm,
    plain_rotary,
)
from mindspeed_mm.fsdp.utils.device import npu_operator


@dataclass(frozen=True)
class FusedOperators:
    """Operators of one provider. Gradients flow through all of them."""

    provider: str
    rms_norm: Callable[[Tensor, Tensor, float, float, bool], Tensor]
    """(x, weight, eps, offset, rounds_first) → x / rms(x) · (offset + weight); `rounds_first`: to the type of x before
    the weight, as Llama does, not after it."""
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """(q, k, cos, sin) → both turned; (B, H, T, D) and (B, T, D), the second half of D as the first."""
    silu_mul: Callable[[Tensor, Tensor], Tensor]
    """(gate, up) → silu(gate) · up."""


def fused_operators(provider: str) -> FusedOperators:
    """Those of `LIGER`, `NPU` or `COMPILED`. Tensors on meta, of models that are only looked at, go through the plain
    formulas: kernels need data.

    Raises:
        MachineError: torch_npu has no such operator.
    """
    found = {LIGER: _of_liger, NPU: _of_npu, COMPILED: _of_compiler}[provider]()

    def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool) -> Tensor:
        of = plain_norm if x.is_meta else found.rms_norm
        return of(x, weight, eps, offset, rounds_first)

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if q.is_meta:
            return plain_rotary(q, cos, sin), plain_rotary(k, cos, sin)
        return found.rotary(q, k, cos, sin)

    def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
        of = plain_gate if gate.is_meta else found.silu_mul
        return of(gate, up)

    return FusedOperators(provider, rms_norm, rotary, silu_mul)


def _of_compiler() -> FusedOperators:
    return FusedOperators(COMPILED, compiled_norm, compiled_rotary, compiled_gate)


def _of_liger() -> FusedOperators:
    norm = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    rope = importlib.import_module("liger_kernel.ops.rope").LigerRopeFunction
    gated = importlib.import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction

    def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool) -> Tensor:
        # Not in place: the gradient that comes in may be wanted elsewhere.
        return norm.apply(x, weight, eps, offset, "llama" if rounds_first else "gemma", False)  # type: ignore[no-any-return]

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        turned_q, turned_k = rope.apply(q, k, cos, sin)
        return turned_q, turned_k

    return FusedOperators(LIGER, rms_norm, rotary, gated.apply)


def _of_npu() -> FusedOperators:
    norm, rope, gated = (npu_operator(name, key=FUSED_KEY) for name in ("npu_rms_norm", "npu_rotary_mul", "npu_swiglu"))

    def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool) -> Tensor:
        weight = weight + offset if offset else weight
        output: Tensor = norm(x, weight.to(x.dtype) if rounds_first else weight, epsilon=eps)[0]
        return output.to(x.dtype)

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rope(q, cos.unsqueeze(1), sin.unsqueeze(1)), rope(k, cos.unsqueeze(1), sin.unsqueeze(1))

    def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
        output: Tensor = gated(torch.cat([gate, up], dim=-1), dim=-1)
        return output

    return FusedOperators(NPU, rms_norm, rotary, silu_mul)
