"""Policy gradients on answers that the model has sampled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.loss.head_loss import HeadLoss
from mindspeed_mm.fsdp.loss.labelled_rows import labelled_rows
from mindspeed_mm.fsdp.loss.objectives import BatchTokens, ModelInputs, Terms, text_tokens
from mindspeed_mm.fsdp.loss.pair_objective import MediaOnce, ReferenceModel
from mindspeed_mm.fsdp.loss.policy_gradient import PolicyRows, PolicyRule, policy_sums


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
