"""The libraries that compute norms, rotary embeddings and gated linear units in one kernel, by
device: liger on CUDA, torch_npu on NPUs. Both are installed packages: nothing is fetched.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.fsdp.utils.device import get_device_type, npu_operator

KEY = "features.fused_kernels"


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


def fused_operators() -> FusedOperators:
    """Those of this device.

    Raises:
        MachineError: There are none, or their package is not installed.
    """
    device_type = get_device_type()
    if device_type == "cuda":
        return _of_liger()
    if device_type == "npu":
        return _of_npu()
    raise MachineError(
        f"there are no fused kernels on '{device_type}'", key=KEY, way_out="Set it to auto, which takes none there."
    )


def _of_liger() -> FusedOperators:
    if importlib.util.find_spec("liger_kernel") is None:
        raise MachineError(
            "needs the package liger-kernel, which is not installed",
            key=KEY,
            way_out="pip install liger-kernel, or set it to auto.",
        )
    norm = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    rope = importlib.import_module("liger_kernel.ops.rope").LigerRopeFunction
    gated = importlib.import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction

    def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool) -> Tensor:
        # Not in place: the gradient that comes in may be wanted elsewhere.
        return norm.apply(x, weight, eps, offset, "llama" if rounds_first else "gemma", False)  # type: ignore[no-any-return]

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        turned_q, turned_k = rope.apply(q, k, cos, sin)
        return turned_q, turned_k

    return FusedOperators("liger", rms_norm, rotary, gated.apply)


def _of_npu() -> FusedOperators:
    norm, rope, gated = (npu_operator(name, key=KEY) for name in ("npu_rms_norm", "npu_rotary_mul", "npu_swiglu"))

    def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool) -> Tensor:
        weight = weight + offset if offset else weight
        output: Tensor = norm(x, weight.to(x.dtype) if rounds_first else weight, epsilon=eps)[0]
        return output.to(x.dtype)

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rope(q, cos.unsqueeze(1), sin.unsqueeze(1)), rope(k, cos.unsqueeze(1), sin.unsqueeze(1))

    def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
        output: Tensor = gated(torch.cat([gate, up], dim=-1), dim=-1)
        return output

    return FusedOperators("torch_npu", rms_norm, rotary, silu_mul)
