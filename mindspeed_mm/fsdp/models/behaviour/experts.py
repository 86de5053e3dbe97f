"""How a model computes its experts where nothing is spread over ranks."""

from __future__ import annotations

import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.ops.experts import ExpertsForward, fused_experts, use_own_experts
from mindspeed_mm.fsdp.ops.real_tokens import RealTokens
from mindspeed_mm.fsdp.utils.model_parts import has_all


def fit_experts(model: nn.Module, dtype: torch.dtype) -> None:
    """Let transformers compute experts one by one where its grouped matrix products do not know the type: fp64.

    Args:
        model: Of transformers.
        dtype: That it computes in.
    """
    if dtype == torch.float64 and has_all(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")


def choose_experts(model: nn.Module, *, grouped: bool, skip_padding: bool) -> None:
    """Let experts behind transformers' interface be computed by ours when a feature asks for it.

    Args:
        model: Built, not sharded.
        grouped: `model.use_grouped_expert_matmul`; a model without such experts may read the key itself.
        skip_padding: `features.skip_moe_pad_tokens`.

    Raises:
        ConfigError: Padding is to be left out, and the model has no such experts.
    """
    if not grouped and not skip_padding:
        return
    experts = fused_experts(model)
    if skip_padding and not experts:
        raise ConfigError(
            f"{type(model).__name__} has no experts behind transformers' interface to keep padding from",
            key="features.skip_moe_pad_tokens",
            way_out="Set it to false.",
        )
    if not experts:
        return
    real_tokens = None
    if skip_padding:
        real_tokens = RealTokens(model)
    forward = ExpertsForward(real_tokens)
    for module in experts.values():
        use_own_experts(module, forward)
