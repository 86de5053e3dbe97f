"""Objectives of generators that learn from rewards: a micro-batch is one step, or one noise level, of some samples.

With the clipped policy loss a sampling step that drew noise is an action, its density is the policy's. Negative-aware
fine-tuning (DiffusionNFT, arXiv 2509.16117) needs no densities and takes any solver: the samples of a rollout are
denoised again, good ones by the policy, bad ones by its mirror image about the old policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.loss.objectives import BatchTokens, Terms
from mindspeed_mm.fsdp.loss.sde_steps import SdeStep, StepDensity, clean, kl_divergence, log_prob
from mindspeed_mm.fsdp.params.posttrain_args import GrpoArguments, NftArguments

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.models.diffusion.velocity import Denoiser


class RewardObjective:
    """What both have in common: samples of a rollout count alike, times the steps that are trained.

    Args:
        denoise: The path through the transformer.
        kl_weight: Of the distance from the reference; 0: none is needed.
    """

    term = "policy"

    def __init__(self, denoise: Denoiser, kl_weight: float) -> None:
        self._denoise, self._kl_weight = denoise, kl_weight
        self._watched: dict[str, list[torch.Tensor]] = {}

    @property
    def needs_reference(self) -> bool:
        """Whether the distance from a reference is a part of the loss."""
        return self._kl_weight > 0

    def prepare(self, batch: Batch, *, training: bool = True) -> Batch:
        """The rollout has prepared it."""
        return batch

    def count(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Samples × steps, the same for all terms."""
        samples = float(sum(len(batch["sample_ids"]) for batch in batches))
        counts = {self.term: samples}
        if self.needs_reference:
            counts["kl"] = samples
        return counts

    def tokens(self, batch: Batch) -> BatchTokens:
        """Count the latent tokens of all samples, each of which is trained."""
        each = self._denoise.adapter.geometry.tokens(tuple(batch["latents"].shape[1:]))
        whole = each * len(batch["sample_ids"])
        return BatchTokens(whole, whole)

    def take_metrics(self) -> dict[str, float]:
        """Means of what was watched since the last call, of this rank."""
        found = {name: float(torch.stack(values).mean()) for name, values in self._watched.items()}
        self._watched.clear()
        return found

    def _watch(self, name: str, values: torch.Tensor) -> None:
        self._watched.setdefault(name, []).append(values.detach().float().mean())


class FlowPolicyObjective(RewardObjective):
    """Flow-GRPO, DanceGRPO, MixGRPO and GRPO-Guard: the clipped loss of steps that drew noise, and, with `beta`, the
    exact KL divergence from the reference.

    A batch has `latents` (x before the step), `_time`, `_step` (a `SdeStep`, the same for all rows), `_sample` (x
    behind it), `_advantages`, `_old_log_probs`, with `ratio_norm` `_old_means` and, with a reference, `_reference` (its
    v).

    Args:
        denoise: The path through the transformer.
        arguments: `posttrain.grpo`.
    """

    def __init__(self, denoise: Denoiser, arguments: GrpoArguments) -> None:
        super().__init__(denoise, arguments.beta)
        self._arguments = arguments

    def describe(self) -> str:
        """Return a phrase for the log: the clipping, and the weight of the KL divergence where there is a reference."""
        described = f"policy gradient of sampling steps, clipped at 1 ± {self._arguments.clip_range:g}"
        if self._arguments.ratio_norm:
            described += ", ratios normalised"
        if self.needs_reference:
            described += f", KL × {self._kl_weight:g}"
        return described

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        """Return the sums over samples of the clipped loss and, with a reference, of the weighted KL divergence."""
        x, step = batch["latents"], batch["_step"]
        density = step.density(x, self._denoise(model, x, batch["_time"], batch))
        advantage, old = batch["_advantages"], batch["_old_log_probs"]
        if self._arguments.ratio_norm:
            ratio = normalised_ratio(batch["_sample"], density, old, batch["_old_means"])
        else:
            ratio = policy_ratio(batch["_sample"], density, old)
        loss = clipped_loss(ratio, advantage, self._arguments.clip_range)
        if self._arguments.ratio_norm:
            loss = loss / -step.delta
        self._watch("clip_share", clipped_share(ratio, advantage, self._arguments.clip_range))
        self._watch("ratio_gap", ratio.log().abs())
        terms = {self.term: loss.sum()}
        if self.needs_reference:
            terms["kl"] = self._kl_weight * self._divergence(step, x, density, batch["_reference"])
        return terms

    def _divergence(self, step: SdeStep, x: torch.Tensor, density: StepDensity, v_ref: torch.Tensor) -> torch.Tensor:
        divergence = kl_divergence(density.mean, step.density(x, v_ref).mean, density.std)
        self._watch("kl", divergence)
        return divergence.sum()


class NftObjective(RewardObjective):
    """DiffusionNFT: samples of a rollout are given noise again, and denoised.

    A batch has `latents` (x₀), `_noise`, `_time`, `_advantages`, `_old` (v of the policy that drew the samples) and,
    with a reference, `_reference` (its v).

    Args:
        denoise: The path through the transformer.
        arguments: `posttrain.nft`.
        most: Largest magnitude of an advantage.
    """

    def __init__(self, denoise: Denoiser, arguments: NftArguments, most: float) -> None:
        super().__init__(denoise, arguments.kl)
        self._arguments, self._most = arguments, most

    def describe(self) -> str:
        """Return a phrase for the log: β, and the weight of the KL divergence where there is a reference."""
        described = f"negative-aware fine-tuning, β {self._arguments.beta:g}"
        if self.needs_reference:
            return f"{described}, KL × {self._kl_weight:g}"
        return described

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        """Return the sums over samples of the DiffusionNFT loss and, with a reference, of the weighted distance from
        its v."""
        latents, noise, time = batch["latents"], batch["_noise"], batch["_time"]
        noisy = self._denoise.adapter.noise_path.mix(latents, noise, time.view(-1, *[1] * (latents.dim() - 1)))
        v = self._denoise(model, noisy, time, batch)
        good = probability_of_good(used_advantages(batch["_advantages"], self._arguments.adv_mode), self._most)
        losses = nft_loss(v, batch["_old"], noisy, latents, time, good, self._arguments.beta)
        terms = {self.term: losses.sum() * (self._most / self._arguments.beta)}
        self._watch("old_gap", (v - batch["_old"]).abs())
        if self.needs_reference:
            distance = (v - batch["_reference"]).square().flatten(1).mean(dim=1)
            self._watch("kl", distance)
            terms["kl"] = self._kl_weight * distance.sum()
        return terms


def used_advantages(advantage: torch.Tensor, mode: str) -> torch.Tensor:
    """Advantages as `posttrain.nft.adv_mode` reads them: all; those above or below 0 alone; 1 where above 0, else 0;
    their signs."""
    if mode == "positive_only":
        return advantage.clamp(min=0)
    if mode == "negative_only":
        return advantage.clamp(max=0)
    if mode == "one_only":
        return (advantage > 0).to(advantage.dtype)
    if mode == "binary":
        return advantage.sign()
    return advantage


# --- clipped policy loss ----------------------------------------------------------------------------------------------


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


# --- negative-aware fine-tuning ---------------------------------------------------------------------------------------

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
