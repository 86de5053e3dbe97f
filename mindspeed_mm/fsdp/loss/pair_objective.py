"""Training on preference pairs: both answers of a pair are rows of one micro-batch, and go through the model together.

B pairs make 2B rows of L tokens: the chosen answers' rows, then the rejected ones'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.distributed.nn.functional as dist_nn
from torch import Tensor, nn

from mindspeed_mm.core.batch import IGNORED_LABEL, Batch
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.loss.head_loss import HeadLoss, labelled_rows
from mindspeed_mm.fsdp.loss.objectives import BatchTokens, ModelInputs, Terms, text_tokens
from mindspeed_mm.fsdp.loss.preference import PAIR_LOSS, PairScores, beta_of, loss_weights
from mindspeed_mm.fsdp.ops.context_attention.share import CONTEXT_KEY
from mindspeed_mm.fsdp.params.posttrain_args import DpoArguments


class ReferenceModel(Protocol):
    """A reference that scores answers when they are trained on."""

    def log_probs(
        self,
        model: nn.Module,
        inputs: Batch,
        rows: Tensor,
        targets: Tensor,
        suppressed: Tensor | None = None,
        *,
        temperature: float = 1.0,
    ) -> Tensor:
        """(n,) of the labelled tokens; called without gradients.

        Args:
            model: The policy.
            inputs: Arguments of its `forward`.
            rows: (n,) indices into the flattened tokens.
            targets: (n,) ids.
            suppressed: (s,) ids that are left out of the softmax.
            temperature: Logits are divided by it.
        """
        ...

    def describe(self) -> str:
        """Return a short name of the reference for the log."""
        ...


@runtime_checkable
class KnownAnswers(Protocol):
    """A reference that has scored all answers before training."""

    def answers(self, batch: Batch, counts: Tensor) -> Tensor:
        """(2B,) log-probabilities of the answers of a micro-batch, on the host.

        Args:
            batch: As collated.
            counts: (2B,) how many labels each answer has.

        Raises:
            DataError: It knows nothing of a pair.
        """
        ...

    def describe(self) -> str:
        """Return a short name of the reference for the log."""
        ...


ReferencePolicy = ReferenceModel | KnownAnswers
"""Where the log-probabilities of the reference come from."""


class MediaOnce(Protocol):
    """Lets a picture that several answers show be encoded once."""

    def repeat(self, batch: Batch) -> Batch:
        """A batch that holds media once, as the model takes it."""
        ...


class PairObjective:
    """The losses of `posttrain.dpo`.

    Each loss is a sum over pairs, divided by the pairs of the whole step; the cross-entropy of chosen answers, `sft`,
    is divided by their labels, and that of `pref_ftx_by: pair` is a mean of each answer, divided by the pairs. Beside
    them are measured, in the log only: `rewards/margins`, β · h;
    `rewards/accuracies`, the share of pairs with h above 0; `logps/chosen` and `logps/rejected`, log-probabilities of
    whole answers; and `kl/reference`, how much less probable the answers have become than under the reference, in nats
    per token. `ld_alpha` weighs the tokens of all of these but `logps/*`.

    Args:
        model: The policy.
        head: Of the policy.
        dpo: The section.
        reference: None where no loss needs one.
        media: How media that both answers share reach the model.
    """

    term, sft_term, sft_by_pair_term = "loss", "sft", "sft_by_pair"

    def __init__(
        self,
        model: nn.Module,
        head: HeadLoss,
        dpo: DpoArguments,
        reference: ReferencePolicy | None,
        media: MediaOnce,
    ) -> None:
        self._inputs, self._head = ModelInputs(model), head
        self._reference, self._media = reference, media
        self._dpo, self._beta, self._ld_alpha = dpo, beta_of(dpo), dpo.ld_alpha
        self._loss_weights = loss_weights(dpo)
        self._sft = self._loss_weights.pop("sft", 0.0)
        self._sft_by_pair = dpo.pref_ftx if dpo.pref_ftx_by == "pair" else 0.0

    def prepare(self, batch: Batch, *, training: bool = True) -> Batch:
        """Add the labelled rows with their targets, to which answer each belongs, and the labels of each answer.

        Raises:
            DataError: The rows are no pairs, or the reference knows nothing of them.
        """
        labels = batch["shift_labels"]
        if batch.get("pairs") is None or 2 * batch["pairs"] != len(labels):
            raise DataError(
                "the batch holds no preference pairs",
                key="data.dataset_param.basic_parameters.stage",
                way_out="Set stage: rm, for rows with a chosen and a rejected answer.",
            )
        rows = labelled_rows(labels)
        counts = (labels != IGNORED_LABEL).sum(dim=1)
        chosen, rejected = counts.chunk(2)
        prepared = self._media.repeat(batch) | {
            "_rows": rows,
            "_targets": labels.reshape(-1).index_select(0, rows),
            # Of 2B answers, the one whose row a label stands in.
            "_segment": rows // labels.shape[1],
            "_tokens": counts,
            # Not those that only fill up, nor those that lost all of an answer's labels when it was cut.
            "_counts": ((chosen > 0) & (rejected > 0)).double(),
        }
        if self._ld_alpha is not None:
            prepared["_weights"] = _tail_weights(labels, counts, self._ld_alpha)
        if isinstance(self._reference, KnownAnswers):
            prepared["_reference"] = self._reference.answers(batch, counts)
        return prepared

    def tokens(self, batch: Batch) -> BatchTokens:
        """Real tokens and labels, of both answers."""
        return text_tokens(batch)

    def count(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Pairs; of the cross-entropy the chosen answers' labels."""
        pairs = sum(float(batch["_counts"].sum()) for batch in batches)
        found = dict.fromkeys((self.term, "rewards/margins", "rewards/accuracies"), pairs)
        found |= {"logps/chosen": pairs, "logps/rejected": pairs}
        if self._sft:
            found[self.sft_term] = sum(int(_chosen(batch["_tokens"]).sum()) for batch in batches)
        if self._sft_by_pair:
            found[self.sft_by_pair_term] = pairs
        if self._reference is not None:
            found["kl/reference"] = sum(int(batch["_tokens"].sum()) for batch in batches)
        return found

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        """Sums over the pairs of this micro-batch."""
        inputs, rows, targets = self._inputs(batch), batch["_rows"], batch["_targets"]
        reference = None
        if self._reference is not None and not isinstance(self._reference, KnownAnswers):
            with torch.no_grad():
                reference = self._sums(batch, self._reference.log_probs(model, inputs, rows, targets))
        found = self._head.log_probs(model, inputs, rows, targets)
        sums = self._sums(batch, found)
        whole = self._whole(batch, found, sums)
        if "_reference" in batch:
            reference = batch["_reference"].to(sums)
        terms = self._losses(batch, sums, reference)
        chosen, rejected = (whole.detach() * batch["_counts"].to(whole).repeat(2)).chunk(2)
        terms |= {"logps/chosen": chosen.sum(), "logps/rejected": rejected.sum()}
        if self._sft:
            terms[self.sft_term] = -self._sft * _chosen(whole).sum()
        if self._sft_by_pair:
            means = _chosen(whole) / _chosen(batch["_tokens"]).clamp(min=1).to(whole)
            terms[self.sft_by_pair_term] = -self._sft_by_pair * (means * batch["_counts"].to(whole)).sum()
        share = batch.get(CONTEXT_KEY)
        if share is None:
            return terms
        # Every rank that shares a sequence computes all of the loss, and gives its part of it.
        return {name: value / share.groups.everyone.size() for name, value in terms.items()}

    def answers(self, model: nn.Module, batch: Batch) -> Tensor:
        """(2B,) log-probabilities of the answers of a prepared micro-batch."""
        found = self._head.log_probs(model, self._inputs(batch), batch["_rows"], batch["_targets"])
        return self._sums(batch, found)

    def describe(self) -> str:
        """Return a phrase for the log: the losses with their weights, beta, the reference, and the head's loss."""
        names = []
        for name, weight in self._loss_weights.items():
            names.append(name if weight == 1 else f"{weight:g} · {name}")
        if self._sft:
            names.append(f"{self._sft:g} · sft")
        if self._sft_by_pair:
            names.append(f"{self._sft_by_pair:g} · sft by pair")
        described = f"preferences, {' + '.join(names)}, beta {self._beta:g}"
        if self._reference is not None:
            described += f", reference: {self._reference.describe()}"
        return f"{described}; {self._head.describe()}"

    def _losses(self, batch: Batch, sums: Tensor, reference: Tensor | None) -> Terms:
        """Σ over pairs of the losses, and what is measured beside them."""
        counts = batch["_counts"].to(sums)
        ratios = sums  # without a reference the losses are of the probabilities themselves
        if reference is not None:
            ratios = sums - reference
        pair = PairScores(*sums.chunk(2), *ratios.chunk(2), *batch["_tokens"].clamp(min=1).to(sums).chunk(2))
        total = sums.new_zeros(len(counts))
        for name, weight in self._loss_weights.items():
            total = total + weight * PAIR_LOSS[name](pair, self._beta, self._dpo)
        margins = self._beta * pair.margin.detach()
        if reference is None:
            # What needs no reference (SimPO, ORPO) compares means over tokens.
            margins = self._beta * pair.mean_margin.detach()
        found = {
            self.term: (total * counts).sum(),
            "rewards/margins": (margins * counts).sum(),
            "rewards/accuracies": ((margins > 0).to(sums) * counts).sum(),
        }
        if reference is not None:
            found["kl/reference"] = -ratios.detach().sum()
        return found

    def _sums(self, batch: Batch, log_probs: Tensor) -> Tensor:
        """(2B,) log-probabilities of answers, of which each rank may hold some tokens."""
        weights = batch.get("_weights")
        if weights is not None:
            log_probs = log_probs * weights.to(log_probs)
        sums = log_probs.new_zeros(len(batch["_tokens"])).index_add(0, batch["_segment"], log_probs)
        share = batch.get(CONTEXT_KEY)
        if share is None:
            return sums
        # Differentiable, since each rank has some tokens of an answer.
        return dist_nn.all_reduce(sums, group=share.groups.everyone)  # type: ignore[no-untyped-call, no-any-return]

    def _whole(self, batch: Batch, log_probs: Tensor, sums: Tensor) -> Tensor:
        """(2B,) the same with all tokens alike, whatever `ld_alpha` weighs."""
        if "_weights" not in batch:
            return sums
        without = dict(batch)
        del without["_weights"]
        return self._sums(without, log_probs)


def _chosen(of_answers: Tensor) -> Tensor:
    return of_answers[: len(of_answers) // 2]


def _tail_weights(labels: Tensor, counts: Tensor, alpha: float) -> Tensor:
    """(n,) of the labelled tokens: alpha behind the length of the pair's shorter answer (LD-DPO, arXiv:2409.06411,
    equation 11), else 1."""
    is_label = labels != IGNORED_LABEL
    shared = torch.minimum(*counts.chunk(2)).repeat(2)
    # Of each label in its own answer, from 1.
    place = is_label.cumsum(dim=1)[is_label]
    weights = torch.ones(len(place), dtype=torch.float64)
    return weights.masked_fill(place > shared.repeat_interleave(counts), alpha)
