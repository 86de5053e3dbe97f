"""Objectives of generators that learn from rewards: a micro-batch is one step, or one noise level, of some samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.loss.flow_policy import clipped_loss, clipped_share, normalised_ratio, policy_ratio
from mindspeed_mm.fsdp.loss.nft import nft_loss, probability_of_good
from mindspeed_mm.fsdp.loss.objectives import BatchTokens, Terms
from mindspeed_mm.fsdp.loss.sde_steps import SdeStep, StepDensity, kl_divergence
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
        return f"{described}, KL × {self._kl_weight:g}" if self.needs_reference else described

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
    return advantage.sign() if mode == "binary" else advantage
