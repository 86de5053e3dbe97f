"""Negative-aware fine-tuning of generators (DiffusionNFT, arXiv 2509.16117): no densities, any solver; the samples of a
rollout are denoised again, good ones by the policy, bad ones by its mirror image about the old policy.
"""

from __future__ import annotations

import torch

from mindspeed_mm.fsdp.loss.sde_steps import clean

_LEAST_ERROR = 1e-5
_GROWTH, _MOST_DECAY = 1e-3, 0.5


def probability_of_good(advantage: torch.Tensor, most: float) -> torch.Tensor:
    """r = clip(A / (2 A_max) + ½, 0, 1)."""
    return (advantage / (2 * most) + 0.5).clamp(0, 1)


def both_predictions(v: torch.Tensor, v_old: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """v± = v_old ± β (v − v_old)."""
    moved = beta * (v - v_old)
    return v_old + moved, v_old - moved


def nft_loss(
    v: torch.Tensor,
    v_old: torch.Tensor,
    noisy: torch.Tensor,
    latents: torch.Tensor,
    sigma: torch.Tensor,
    good: torch.Tensor,
    beta: float,
) -> torch.Tensor:
    """(B,) r ‖x̂₀⁺ − x₀‖² / w⁺ + (1 − r) ‖x̂₀⁻ − x₀‖² / w⁻, means over latents; w is the mean absolute error of its side,
    detached. Its optimum (w aside) is v_old + (2 / β) Cov(r, v).

    Args:
        v: Predicted by the policy at `noisy`, (B, …).
        v_old: By the policy that drew the samples.
        noisy: (1 − σ) x₀ + σ ε.
        latents: x₀.
        sigma: (B,).
        good: (B,) r.
        beta: How far the two sides lie apart.
    """
    level = sigma.reshape(-1, *[1] * (latents.dim() - 1))
    positive, negative = (
        _weighted_error(clean(noisy, side, level) - latents) for side in both_predictions(v, v_old, beta)
    )
    return good * positive + (1 - good) * negative


def old_policy_decay(update: int) -> float:
    """The share of the old policy that stays: min(0.001 i, 0.5) after update i. It follows fast at first, when samples
    have much to gain, and slowly later."""
    return min(_GROWTH * update, _MOST_DECAY)


def _weighted_error(error: torch.Tensor) -> torch.Tensor:
    weight = error.detach().abs().flatten(1).mean(dim=1).clamp(min=_LEAST_ERROR)
    return error.square().flatten(1).mean(dim=1) / weight
