"""Policy gradients on sampled answers: pure functions of log-probabilities, in sums.

Each method is a sum over the tokens of a micro-batch, and what it is divided by is counted over the whole step: any
split of a step into micro-batches and ranks gives the same loss. N tokens of A answers, answer by answer or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from mindspeed_mm.core.errors import ConfigError

PolicyLossType = Literal["dapo", "bnpo", "grpo", "dr_grpo", "cispo", "sapo", "luspo"]
Level = Literal["token", "sequence"]

_BY_ANSWER = frozenset({"grpo", "sapo", "dr_grpo", "luspo"})
"""Methods that are divided by the number of answers; the others by the number of tokens."""
_OF_MEANS = frozenset({"grpo", "sapo"})
"""Methods in which the tokens of an answer share its weight."""


@dataclass(frozen=True)
class PolicyRule:
    """What is summed. The names and defaults are TRL's.

    `dapo` (arXiv:2503.14476), `bnpo` and `cispo` (2506.13585, eq. 4) are divided by the tokens of the step, `grpo`
    (2402.03300, eq. 3) and `sapo` (2511.20347) by its answers, each the mean over its tokens, `dr_grpo` (2503.20783) by
    answers × `max_completion_length`, `luspo` by answers.
    """

    loss_type: PolicyLossType = "dapo"
    level: Level = "token"
    """`sequence`: one ratio for an answer, the geometric mean of those of its tokens (GSPO, 2507.18071)."""
    epsilon: float = 0.2
    epsilon_high: float | None = None
    """None: as `epsilon`. For `cispo` the largest ratio itself."""
    delta: float | None = None
    """Bounds the ratio where the advantage is negative, too (two-sided clipping, 2505.07291)."""
    beta: float = 0.0
    """Of the KL divergence from a reference."""
    corrects_kl: bool = True
    """Multiply the KL of a token by its ratio, so that its gradient is unbiased (2512.02556)."""
    entropy_coef: float = 0.0
    """Of the entropy, which is maximised: its mean over tokens, whatever the rest is divided by."""
    max_completion_length: int = 512
    """Read by `dr_grpo`."""
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)
    """For positive advantages and for the others."""

    @property
    def upper(self) -> float:
        """The upper end of the clip range, as a distance from 1; for `cispo` as a ratio."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def counts_answers(self) -> bool:
        """Whether the loss is divided by answers rather than tokens."""
        return self.loss_type in _BY_ANSWER


class PolicyRows(NamedTuple):
    """The tokens of a micro-batch."""

    log_probs_N: torch.Tensor
    """log p(token | before) under the policy; has a gradient."""
    answer_N: torch.Tensor
    """int64, which answer a token belongs to."""
    advantages_A: torch.Tensor
    tokens_A: torch.Tensor
    """How many tokens each answer has in all; they may be spread over ranks."""
    old_N: torch.Tensor | None = None
    """Under the policy that sampled; None: this very one, and the ratio is 1."""
    reference_N: torch.Tensor | None = None
    """Under the reference; needed where beta is not 0."""
    correction_N: torch.Tensor | None = None
    """How much the loss of a token counts where the sampler was another one than `old`."""
    entropy_N: torch.Tensor | None = None
    """Of the policy at each token, in nats; needed where its coefficient is not 0."""
    ratio_mean_A: torch.Tensor | None = None
    """Means of log ratios, of level `sequence`, where answers are spread over ranks."""


class PolicySums(NamedTuple):
    """0-d sums; the first three are differentiable."""

    policy: torch.Tensor
    kl: torch.Tensor
    """β · KL, summed as the policy's term is; both have one denominator."""
    entropy: torch.Tensor
    """−coefficient · Σ entropy; its denominator is the tokens of the step."""
    clipped: torch.Tensor
    """Tokens whose gradient the clip took away."""
    divergence: torch.Tensor
    """Σ k3 over tokens, without β."""


def policy_sums(rule: PolicyRule, rows: PolicyRows) -> PolicySums:
    """What these tokens add to the loss.

    The surrogate of a token is −min(ρA, clip(ρ, 1−ε, 1+ε_high)A) with ρ = exp(lp − old) (PPO, arXiv:1707.06347,
    eq. 7); for `cispo` −sg[min(ρ, ε_high)]·A·lp; for `sapo` −4/τ·σ(τ(ρ−1))·A. KL is k3 = e^d − d − 1 with
    d = reference − lp (http://joschu.net/blog/kl-approx.html).

    Raises:
        ConfigError: β is not 0 and there is no reference.
    """
    lp = rows.log_probs_N
    old = lp.detach()
    if rows.old_N is not None:
        old = rows.old_N.to(lp.dtype)
    advantages = rows.advantages_A.to(lp.dtype).index_select(0, rows.answer_N)
    ratio = torch.exp(_log_ratio(rule, rows, lp - old))
    surrogate, clipped = _surrogate(rule, ratio, advantages, lp)
    if rows.correction_N is not None:
        surrogate = surrogate * rows.correction_N.to(lp.dtype)
    share = _share(rule, rows, lp)
    zero = lp.new_zeros(())
    kl = divergence = zero
    if rule.beta:
        if rows.reference_N is None:
            raise ConfigError("the KL term needs a reference", key="posttrain.grpo.beta", way_out="Set it to 0.")
        distance = rows.reference_N.to(lp.dtype) - lp
        k3 = torch.exp(distance) - distance - 1
        divergence = k3.detach().sum()
        if rule.corrects_kl:
            k3 = k3 * ratio
        kl = rule.beta * (k3 * share).sum()
    entropy = zero
    if rule.entropy_coef:
        assert rows.entropy_N is not None
        entropy = -rule.entropy_coef * rows.entropy_N.to(lp.dtype).sum()
    return PolicySums((surrogate * share).sum(), kl, entropy, clipped.to(lp.dtype).sum(), divergence)


def _log_ratio(rule: PolicyRule, rows: PolicyRows, by_token: torch.Tensor) -> torch.Tensor:
    if rule.level == "token":
        return by_token
    means_A = rows.ratio_mean_A
    if means_A is None:
        sums_A = by_token.new_zeros(len(rows.advantages_A)).index_add(0, rows.answer_N, by_token)
        means_A = sums_A / rows.tokens_A.clamp(min=1).to(by_token.dtype)
    return means_A.index_select(0, rows.answer_N)


def _surrogate(
    rule: PolicyRule, ratio: torch.Tensor, advantages: torch.Tensor, lp: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(N,) of each token, and whether the clip stopped it."""
    if rule.loss_type == "cispo":
        return -ratio.clamp(max=rule.upper).detach() * advantages * lp, (ratio > rule.upper) & (advantages > 0)
    if rule.loss_type == "sapo":
        positive, other = rule.sapo_temperatures
        temperature = torch.full_like(ratio, other).masked_fill(advantages > 0, positive)
        gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
        return -gate * advantages, torch.zeros_like(advantages, dtype=torch.bool)
    within = ratio.clamp(1 - rule.epsilon, 1 + rule.upper)
    bounded = ratio
    if rule.delta is not None:
        bounded = ratio.clamp(max=rule.delta)
    low = (bounded < 1 - rule.epsilon) & (advantages < 0)
    high = (bounded > 1 + rule.upper) & (advantages > 0)
    return -torch.min(bounded * advantages, within * advantages), low | high


def _share(rule: PolicyRule, rows: PolicyRows, lp: torch.Tensor) -> torch.Tensor:
    """How much each token's loss counts: of a mean over an answer, its share."""
    if rule.loss_type in _OF_MEANS:
        return (1 / rows.tokens_A.clamp(min=1).to(lp.dtype)).index_select(0, rows.answer_N)
    if rule.loss_type == "dr_grpo":
        return torch.full_like(lp, 1 / rule.max_completion_length).detach()
    return torch.ones_like(lp).detach()
