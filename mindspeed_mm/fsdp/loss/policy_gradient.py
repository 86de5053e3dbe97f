"""Policy gradients on answers that the model has sampled: the objective, and its pure functions of log-probabilities.

Each method is a sum over the tokens of a micro-batch, and what it is divided by is counted over the whole step: any
split of a step into micro-batches and ranks gives the same loss. N tokens of A answers, answer by answer or not.

Advantages, how much better each answer is than the others to its prompt, are made of the rewards of all ranks, before
anything is cut into micro-batches: a group that is judged by a part of itself has another mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.loss.head_loss import HeadLoss, labelled_rows
from mindspeed_mm.fsdp.loss.objectives import BatchTokens, ModelInputs, Terms, text_tokens
from mindspeed_mm.fsdp.loss.pair_objective import MediaOnce, ReferenceModel


class PolicyObjective:
    """What a policy gradient counts and sums.

    Beside what a batch of text has, a batch brings `_advantages` (B,), `_sampled` (n,), the sampler's log-probability
    of each labelled token, row by row, and `_fresh`, whether the policy has not changed since. Then its own
    log-probabilities are the old ones and every ratio is 1, to the bit and without a further pass.

    Args:
        model: Under any plan.
        head: The loss of its output head.
        rule: What is summed.
        media: How media that several answers share reach the model.
        suppressed: Ids that the model never gives: they are left out of the softmax, as while it samples.
        temperature: Of the sampler; logits are divided by it.
        reference: Needed where the rule has a KL term. Its probabilities are of the same softmax, and are computed anew
            for each step that uses an answer.
        correction: How a sampler of other probabilities than the model's is corrected, and the bound; None: it is the
            model itself.
    """

    def __init__(
        self,
        model: nn.Module,
        head: HeadLoss,
        rule: PolicyRule,
        media: MediaOnce,
        *,
        suppressed: Sequence[int] = (),
        temperature: float = 1.0,
        reference: ReferenceModel | None = None,
        correction: tuple[str, float] | None = None,
    ) -> None:
        self._inputs, self._head, self.rule, self.media = ModelInputs(model), head, rule, media
        self._suppressed = torch.tensor(list(suppressed), dtype=torch.long)
        self._temperature, self._correction = temperature, correction
        self._reference = reference
        self._seen: dict[str, torch.Tensor] = {}

    def prepare(self, batch: Batch, *, training: bool = True) -> Batch:
        """Add the labelled rows, their targets and the answer of each."""
        labels = batch["shift_labels"]
        rows = labelled_rows(labels)
        answers = rows // labels.shape[1]
        return self.media.repeat(batch) | {
            "_rows": rows,
            "_targets": labels.reshape(-1).index_select(0, rows),
            "_segment": answers,
            "_tokens": torch.bincount(answers, minlength=labels.shape[0]),
        }

    def tokens(self, batch: Batch) -> BatchTokens:
        """Real tokens and those of answers."""
        return text_tokens(batch)

    def count(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Tokens of answers, or answers, as the method divides."""
        tokens = sum(len(batch["_rows"]) for batch in batches)
        answers = sum(len(batch["_advantages"]) for batch in batches)
        count = answers if self.rule.counts_answers else tokens
        found: dict[str, float] = {"policy": count}
        if self.rule.beta:
            found["kl"] = count
        if self.rule.entropy_coef:
            found["entropy"] = tokens
        return found

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        """Sums over the answers of this micro-batch."""
        inputs, rows, targets = self._inputs(batch), batch["_rows"], batch["_targets"]
        never = None
        if len(self._suppressed):
            never = self._suppressed.to(rows.device)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference = self._reference.log_probs(
                    model, inputs, rows, targets, never, temperature=self._temperature
                )
        has_entropy = bool(self.rule.entropy_coef)
        found = self._head.log_probs(
            model, inputs, rows, targets, never, temperature=self._temperature, with_entropy=has_entropy
        )
        log_probs, entropy = found, None
        if has_entropy:
            log_probs, entropy = found.unbind(1)
        sampled = batch["_sampled"].to(log_probs.dtype)
        old = None if batch["_fresh"] else sampled  # fresh: the policy's own, so that every ratio is 1
        policy = PolicyRows(
            log_probs,
            batch["_segment"],
            batch["_advantages"],
            batch["_tokens"],
            old,
            reference,
            self._corrected(log_probs, sampled, batch),
            entropy,
        )
        sums = policy_sums(self.rule, policy)
        if torch.is_grad_enabled():
            gap = log_probs.new_zeros(())
            if batch["_fresh"]:
                gap = (log_probs.detach() - sampled).abs().sum()
            self._note(log_probs, clip_share=sums.clipped, kl=sums.divergence, log_prob_gap=gap)
        terms = {"policy": sums.policy}
        if self.rule.beta:
            terms["kl"] = sums.kl
        if has_entropy:
            terms["entropy"] = sums.entropy
        return terms

    def describe(self) -> str:
        """For the log: which loss runs."""
        rule = self.rule
        of = "answers" if rule.level == "sequence" else "tokens"
        described = f"policy gradient, {rule.loss_type}, ratios of {of}"
        if self._reference is not None:
            described += f", KL {rule.beta:g}, reference: {self._reference.describe()}"
        if rule.entropy_coef:
            described += f", entropy {rule.entropy_coef:g}"
        return described

    def take_metrics(self) -> dict[str, float]:
        """Means over this rank's tokens since the last call."""
        seen, self._seen = self._seen, {}
        tokens = float(seen.pop("tokens", 0))
        if not tokens:
            return {}
        if not self.rule.beta:
            seen.pop("kl", None)
        return {name: float(value) / tokens for name, value in seen.items()}

    def _corrected(self, log_probs: torch.Tensor, sampled: torch.Tensor, batch: Batch) -> torch.Tensor | None:
        """How much each token's loss counts where a server sampled it: min(p / p of the server, bound), or 0 above the
        bound."""
        if self._correction is None or not batch["_fresh"]:
            return None
        kind, most = self._correction
        ratio = torch.exp(log_probs.detach() - sampled)
        if kind == "token_truncate":
            return ratio.clamp(max=most)
        return ratio.where(ratio <= most, 0.0)

    def _note(self, log_probs: torch.Tensor, **sums: torch.Tensor) -> None:
        sums["tokens"] = torch.tensor(float(len(log_probs)))
        for name, value in sums.items():
            value = value.detach()
            self._seen[name] = self._seen[name] + value if name in self._seen else value


# --- the sums ---------------------------------------------------------------------------------------------------------

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
        if self.epsilon_high is None:
            return self.epsilon
        return self.epsilon_high

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
    share = _token_shares(rule, rows, lp)
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


def _token_shares(rule: PolicyRule, rows: PolicyRows, lp: torch.Tensor) -> torch.Tensor:
    """How much each token's loss counts: of a mean over an answer, its share."""
    if rule.loss_type in _OF_MEANS:
        return (1 / rows.tokens_A.clamp(min=1).to(lp.dtype)).index_select(0, rows.answer_N)
    if rule.loss_type == "dr_grpo":
        return torch.full_like(lp, 1 / rule.max_completion_length).detach()
    return torch.ones_like(lp).detach()


Scale = Literal["group", "batch", "none"]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]

EPSILON = 1e-4
"""Added to standard deviations (TRL's number)."""


@dataclass(frozen=True)
class Advantages:
    """What rewards come to. A answers; groups are consecutive."""

    values: torch.Tensor
    """(A,) fp64; 0 where no reward judged the answer."""
    rewards: torch.Tensor
    """(A,) fp64, the weighted sum; not a number where no reward judged the answer."""
    without_spread: float
    """Share of groups whose answers are all worth the same: nothing is learnt from them."""


def group_advantages(
    rewards_AR: torch.Tensor,
    weights_R: torch.Tensor,
    group_size: int,
    *,
    scale: Scale = "group",
    aggregation: Aggregation = "sum_then_normalize",
) -> Advantages:
    """Advantages of answers, group by group.

    `sum_then_normalize`: R = Σ w·r, A = (R − mean of the group) / (std + 1e-4), std unbiased, of the group or of the
    batch; `none` leaves the division out (GRPO, arXiv:2402.03300, section 4.1.2; without std: Dr. GRPO, 2503.20783).
    `normalize_then_sum`: each reward is normalised in its group, their weighted sum over the batch (GDPO, 2601.05242).
    A reward that is not a number (null) is left out of means, deviations and sums.

    Args:
        rewards_AR: (answers, rewards), of all ranks; NaN where a reward does not judge an answer.
        weights_R: (rewards,).
        group_size: Answers to each prompt; consecutive.
        scale: Which standard deviation divides; read for `sum_then_normalize`.
        aggregation: What is normalised.
    """
    rewards_AR, weights_R = rewards_AR.double(), weights_R.double()
    judged_A = ~rewards_AR.isnan().all(dim=1)
    nan = torch.tensor(float("nan"), dtype=torch.float64)
    sums_A = torch.where(judged_A, (rewards_AR * weights_R).nansum(dim=1), nan)
    spread_G = _std(sums_A.view(-1, group_size), dim=1)
    if aggregation == "normalize_then_sum":
        grouped = rewards_AR.view(-1, group_size, rewards_AR.shape[1])
        own = (grouped - grouped.nanmean(dim=1, keepdim=True)) / (_std(grouped, dim=1).unsqueeze(1) + EPSILON)
        total_A = torch.where(judged_A, (own.view_as(rewards_AR) * weights_R).nansum(dim=1), nan)
        values_A = (total_A - total_A.nanmean()) / (_std(total_A, dim=0) + EPSILON)
    else:
        values_A = (sums_A.view(-1, group_size) - sums_A.view(-1, group_size).nanmean(dim=1, keepdim=True)).view(-1)
        if scale == "group":
            values_A = values_A / (spread_G.repeat_interleave(group_size) + EPSILON)
        elif scale == "batch":
            values_A = values_A / (_std(sums_A, dim=0) + EPSILON)
    flat = spread_G.nan_to_num(0.0) < 1e-8
    return Advantages(values_A.nan_to_num(0.0), sums_A, float(flat.double().mean()))


def _std(numbers: torch.Tensor, dim: int) -> torch.Tensor:
    """Unbiased, of what is a number."""
    known = ~numbers.isnan()
    count = known.sum(dim=dim)
    squares = (numbers - numbers.nanmean(dim=dim, keepdim=True)).square()
    return (squares.nansum(dim=dim) / (count - 1).clamp(min=1)).sqrt().where(count > 0, float("nan"))
