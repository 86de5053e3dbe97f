"""The fused linear cross-entropy of liger-kernel (Hsu et al. 2024, arXiv:2410.10989), where it is installed.

It does on CUDA and NPU devices, in one Triton kernel a slice, what `ops/linear_cross_entropy.py` does in torch
operations everywhere. It chooses the slices itself and takes no weights of rows.
"""

from __future__ import annotations

import importlib
import importlib.util
from importlib import metadata
from typing import Any

import torch

from mindspeed_mm.fsdp.ops.linear_cross_entropy import LossPlan, LossSums

PACKAGE, _FUNCTIONS = "liger_kernel", "liger_kernel.transformers.functional"
_DEVICES = {"cuda", "npu"}
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


class LigerKernel:
    """The kernel of an installed version."""

    def __init__(self) -> None:
        self._function: Any = importlib.import_module(_FUNCTIONS).liger_fused_linear_cross_entropy

    def takes(self, hidden_NH: torch.Tensor, weights_N: torch.Tensor | None, plan: LossPlan) -> bool:
        """Whether it computes this: rows that count alike, a vocabulary in one part, a type that it knows."""
        is_known = hidden_NH.device.type in _DEVICES and hidden_NH.dtype in _DTYPES and len(hidden_NH) > 0
        return is_known and weights_N is None and plan.vocabulary is None and plan.behind is None

    def __call__(
        self,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        plan: LossPlan,
    ) -> LossSums:
        """As `linear_cross_entropy`; the gradient of both sums flows through the first."""
        found = self._function(
            hidden_NH,
            weight_VH,
            targets_N,
            bias=bias_V,
            reduction="sum",
            lse_square_scale=plan.z_loss_coef,
            return_z_loss=bool(plan.z_loss_coef),
            accum_dtype=torch.float32,
        )
        if not plan.z_loss_coef:
            return LossSums(found, torch.zeros_like(found))
        z_loss = found.z_loss.detach().to(found.loss.dtype)
        return LossSums(found.loss - z_loss, z_loss)

    def describe(self) -> str:
        """Return a phrase for the log, with the package's version."""
        return f"liger-kernel {metadata.version('liger-kernel')}, fused linear cross-entropy where tokens count alike"


def find_liger(device_type: str) -> LigerKernel | None:
    """The kernel, where the device can run it and the package is installed."""
    if device_type not in _DEVICES or importlib.util.find_spec(PACKAGE) is None:
        return None
    return LigerKernel()
