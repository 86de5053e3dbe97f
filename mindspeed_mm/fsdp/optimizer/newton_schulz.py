"""Orthogonal directions of matrices by Newton-Schulz iteration: what Muon makes of a momentum."""

from __future__ import annotations

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic, by Keller Jordan (Muon, 2024): steepest at 0, so that few steps suffice. Singular values
end between 0.7 and 1.2, not at 1."""
EPS = 1e-7


def orthogonal(matrices: torch.Tensor, steps: int) -> torch.Tensor:
    """U Vᵀ, roughly, of every matrix U Σ Vᵀ.

    Args:
        matrices: (…, rows, columns).
        steps: Of the iteration.

    Returns:
        Of the same shape and dtype. Computed in bf16 on an accelerator, in the matrices' own dtype on a CPU and for
        fp64.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.reshape(-1, *matrices.shape[-2:])
    x = x.mT if is_tall else x  # the smaller product
    x = (x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=EPS)).to(_dtype(matrices))
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).reshape(matrices.shape).to(matrices.dtype)


def _dtype(matrices: torch.Tensor) -> torch.dtype:
    keeps = matrices.device.type == "cpu" or matrices.dtype == torch.float64
    return matrices.dtype if keeps else torch.bfloat16
