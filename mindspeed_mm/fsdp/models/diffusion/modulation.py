"""Norms whose scale and shift each sample has of its own, by the time that it is at."""

from __future__ import annotations

import torch
from torch import nn


def modulated(norm: nn.LayerNorm, tokens_BLD: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """norm(tokens) · (1 + scale) + shift, of which each sample has its own, (B, 1, D). The norm's weight and bias take
    them in: the backward pass keeps nothing of all tokens but the tokens themselves."""
    weight, bias = 1 + scale, shift
    if norm.elementwise_affine:
        weight, bias = norm.weight * weight, norm.bias * weight + shift
    made = [
        nn.functional.layer_norm(tokens_1LD, norm.normalized_shape, weight_D, bias_D, norm.eps)
        for tokens_1LD, weight_D, bias_D in zip(tokens_BLD.split(1), weight[:, 0], bias[:, 0], strict=True)
    ]
    return made[0] if len(made) == 1 else torch.cat(made)
