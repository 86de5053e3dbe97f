"""The clipped policy loss of generators: a sampling step that drew noise is an action, its density is the policy's."""

from __future__ import annotations

import torch

from mindspeed_mm.fsdp.loss.sde_steps import StepDensity, log_prob


def clipped_loss(ratio: torch.Tensor, advantage: torch.Tensor, clip_range: float) -> torch.Tensor:
    """max(−A ρ, −A clip(ρ, 1 − c, 1 + c)), (B,) (Flow-GRPO, arXiv 2505.05470, equation 6)."""
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(-advantage * ratio, -advantage * clipped)


def clipped_share(ratio: torch.Tensor, advantage: torch.Tensor, clip_range: float) -> torch.Tensor:
    """(B,) one where the clipped side is the larger one, so that there is no gradient."""
    outside = torch.where(advantage > 0, ratio > 1 + clip_range, ratio < 1 - clip_range)
    return outside.to(ratio.dtype)


def policy_ratio(sample: torch.Tensor, density: StepDensity, old_log_prob: torch.Tensor) -> torch.Tensor:
    """ρ = exp(log p(sample) − log p_old(sample)), (B,)."""
    return torch.exp(log_prob(sample, density) - old_log_prob)


def normalised_ratio(
    sample: torch.Tensor, density: StepDensity, old_log_prob: torch.Tensor, old_mean: torch.Tensor
) -> torch.Tensor:
    """ρ of GRPO-Guard (arXiv 2510.22319), (B,): exp((Δ log p + ‖Δ mean‖² / (2 std²)) · std).

    The log of the plain ratio has a negative mean, by the distance of the means, and a spread that grows as noise
    falls: without the first and scaled by std it is centred and alike at all steps.
    """
    moved = ((density.mean - old_mean).square() / (2 * density.std**2)).flatten(1).mean(dim=1)
    return torch.exp((log_prob(sample, density) - old_log_prob + moved) * density.std)
