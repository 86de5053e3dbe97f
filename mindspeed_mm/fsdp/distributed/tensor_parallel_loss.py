"""Cross-entropy of logits whose vocabulary is cut over ranks: no rank ever holds all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mindspeed_mm.fsdp.distributed.tensor_parallel_collectives import TensorRanks, all_reduce


def vocabulary_cross_entropy(logits_NV: torch.Tensor, targets: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """−log softmax(logits)[target] of every row, in the logits' dtype: the same numbers on all ranks.

    Three collectives of N numbers: the largest logit, Σ exp(logit − largest), the target's logit.

    Args:
        logits_NV: (N, V / ranks), this rank's consecutive part of the vocabulary.
        targets: (N,) ids in the whole vocabulary, none of them ignored.
        ranks: Of the group, in the order of their parts.

    Returns:
        (N,); sum or weigh it.
    """
    return _VocabularyCrossEntropy.apply(logits_NV, targets, ranks)  # type: ignore[no-untyped-call]


class _VocabularyCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, targets: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
        own = targets - ranks.rank * logits_NV.shape[1]
        elsewhere = (own < 0) | (own >= logits_NV.shape[1])
        own = own.masked_fill(elsewhere, 0).unsqueeze(1)
        largest = logits_NV.amax(dim=1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=ranks.group)
        shifted_NV = logits_NV - largest.unsqueeze(1)
        at_target = all_reduce(shifted_NV.gather(1, own).squeeze(1).masked_fill(elsewhere, 0), ranks)
        probabilities_NV = shifted_NV.exp_()
        total = all_reduce(probabilities_NV.sum(dim=1), ranks)
        probabilities_NV /= total.unsqueeze(1)
        ctx.save_for_backward(probabilities_NV, own, elsewhere)
        return total.log() - at_target

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """softmax − one-hot of the target, times the row's gradient."""
        probabilities_NV, own, elsewhere = ctx.saved_tensors
        one = (~elsewhere).to(probabilities_NV.dtype).unsqueeze(1)
        return probabilities_NV.scatter_add(1, own, -one) * gradients[0].unsqueeze(1), None, None
