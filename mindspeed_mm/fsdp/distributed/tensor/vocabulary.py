"""Logits whose vocabulary is cut over ranks: their cross-entropy, for which no rank ever holds all of them, and the
whole of them, by which tokens are chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import FunctionCtx

from mindspeed_mm.fsdp.distributed.tensor.collectives import TensorRanks, all_reduce, gather_features
from mindspeed_mm.fsdp.distributed.tensor.plan import output_head
from mindspeed_mm.fsdp.models.facts import facts_of


class SplitVocabulary:
    """A vocabulary cut over ranks, for a loss that computes with it (`ops.linear_cross_entropy.VocabularyShare`).

    Args:
        ranks: Of the group, in the order of their parts.
    """

    def __init__(self, ranks: TensorRanks) -> None:
        self._ranks = ranks
        self.rank = ranks.rank

    def largest(self, numbers: torch.Tensor) -> torch.Tensor:
        """The element-wise maximum over ranks."""
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._ranks.group)
        return numbers

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """(…, V / ranks) → (…, V): all ranks' parts, on every rank."""
        return gather_features(logits, self._ranks)

    def total(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in a new tensor."""
        return all_reduce(numbers, self._ranks)

    def token_losses(self, logits_NV: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(N,) −log softmax(logits)[target] and (N,) log Σ exp of whole rows, in the logits' dtype: the same numbers on
        all ranks. Three collectives of N numbers: the largest logit, Σ exp(logit − largest), the target's logit.

        Args:
            logits_NV: (N, V / ranks), this rank's consecutive part of the vocabulary.
            targets: (N,) ids in the whole vocabulary, none of them ignored.
        """
        return _VocabularyCrossEntropy.apply(logits_NV, targets, self)  # type: ignore[no-untyped-call, no-any-return]


def split_vocabulary(model: nn.Module) -> SplitVocabulary | None:
    """The vocabulary of a model that was split; None where its logits are whole."""
    return facts_of(model).noted(SplitVocabulary)


@contextmanager
def whole_logits(model: nn.Module) -> Iterator[None]:
    """Inside, a model whose vocabulary was split returns the logits of all of it on every rank, so that tokens can be
    chosen by them. The ranks of a group call the model equally often."""
    vocabulary = split_vocabulary(model)
    if vocabulary is None:
        yield
        return
    head = model.get_submodule(output_head(model))
    # Outermost: an adapter on the head has added its part by then.
    hook = head.register_forward_hook(lambda _module, _args, logits: vocabulary.whole(logits))
    try:
        yield
    finally:
        hook.remove()


class _VocabularyCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, logits_NV: torch.Tensor, targets: torch.Tensor, vocabulary: SplitVocabulary
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = targets - vocabulary.rank * logits_NV.shape[1]
        elsewhere = (own < 0) | (own >= logits_NV.shape[1])
        own = own.masked_fill(elsewhere, 0).unsqueeze(1)
        largest = vocabulary.largest(logits_NV.amax(dim=1))
        shifted_NV = logits_NV - largest.unsqueeze(1)
        at_target = vocabulary.total(shifted_NV.gather(1, own).squeeze(1).masked_fill(elsewhere, 0))
        probabilities_NV = shifted_NV.exp_()
        total = vocabulary.total(probabilities_NV.sum(dim=1))
        probabilities_NV /= total.unsqueeze(1)
        ctx.save_for_backward(probabilities_NV, own, elsewhere)
        return total.log() - at_target, total.log() + largest

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """softmax − one-hot of the target, times the row's gradient; softmax alone for log Σ exp."""
        probabilities_NV, own, elsewhere = ctx.saved_tensors
        of_losses, of_logsums = gradients
        at_target = of_losses.masked_fill(elsewhere, 0).unsqueeze(1)
        scaled_NV = probabilities_NV * (of_losses + of_logsums).unsqueeze(1)
        return scaled_NV.scatter_add_(1, own, -at_target), None, None
