"""The rough way, for models whose code cannot run without numbers: activations by the linear layers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mindspeed_mm.fsdp.tools.memory_model.simulation import pattern_of

NOTE = "all but the inputs and outputs of linear layers: this model's code could not be simulated"


def linear_activations(model: nn.Module, batch: Mapping[str, Any], dtype: torch.dtype) -> dict[str, int]:
    """Bytes that linear layers keep, by module pattern: each token's inputs and outputs.

    Args:
        model: Parameters on meta or real.
        batch: A prepared micro-batch.
        dtype: What is computed in.
    """
    tokens, sizes = _tokens(batch), Counter[str]()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            sizes[pattern_of(name)] += tokens * (module.in_features + module.out_features) * dtype.itemsize
    return dict(sizes.most_common())


def _tokens(batch: Mapping[str, Any]) -> int:
    """Tokens of text, or else positions of latents, which are at least as many as their tokens."""
    if isinstance(text := batch.get("input_ids"), torch.Tensor):
        return text.numel()
    latents = batch.get("latents")
    return latents[:, 0].numel() if isinstance(latents, torch.Tensor) else 1
