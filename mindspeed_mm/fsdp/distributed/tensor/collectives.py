"""The collectives of tensor parallelism, each with the gradient that belongs to it.

Every rank of a tensor-parallel group holds the same batch. Outside of split layers activations are the same on all of
them (or, under sequence parallelism, each rank holds its own tokens); between a layer cut by output features and one
cut by input features each rank has its own features. The pairs below are the crossings (Shoeybi et al. 2019,
arXiv:1909.08053; with the sequence: Korthikanti et al. 2022, arXiv:2205.05198).

Of logits whose vocabulary is cut over ranks no rank ever holds all for their cross-entropy; the whole of them, by which
tokens are chosen, is gathered where it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import FunctionCtx

from mindspeed_mm.fsdp.distributed.tensor.plan import output_head
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.ops.collectives import AxisRanks, all_gather_single, reduce_scatter_single, with_gradient


class TensorRanks(AxisRanks):
    """The ranks that split matrices with this one (axis `tp`)."""


def copy_to_ranks(tensor: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """Into a split layer: the tensor as it is; gradients of all ranks are summed."""
    return with_gradient(tensor, ranks, _identity_view, all_reduce)


def sum_over_ranks(tensor: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """Out of a split layer: the sum over ranks; the gradient as it is."""
    return with_gradient(tensor, ranks, all_reduce, _identity_view)


def sum_of_all(tensor: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """The sum over ranks, inside of a split layer: each uses it for its own features, so gradients are summed too."""
    return with_gradient(tensor, ranks, all_reduce, all_reduce)


def sum_gradient(parameter: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """A replicated parameter that each rank uses on its own tokens or heads: gradients are summed, in fp32 at least."""
    return with_gradient(parameter, ranks, _identity_view, _all_reduce_precisely)


def gather_features(tensor: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """(…, F / ranks) → (…, F), for whom all ranks do the same with; each gets back its own part of the gradient."""
    return with_gradient(tensor, ranks, _gather_last, _own_last)


def split_tokens(tensor: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """(…, L, H) → (…, ceil(L / ranks), H): this rank's tokens, the last ones filled up with zeros."""
    return with_gradient(pad_tokens(tensor, ranks), ranks, _own_tokens, _gather_tokens)


def join_tokens(tensor: torch.Tensor, ranks: TensorRanks, length: int) -> torch.Tensor:
    """The inverse of `split_tokens`: all `length` tokens, for whom all ranks do the same with."""
    joined = with_gradient(tensor, ranks, _gather_tokens, _own_tokens)
    if joined.shape[-2] == length:
        return joined
    return joined.narrow(-2, 0, length).clone()


def gather_tokens(tensor: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """Into a split layer with sequence parallelism: all tokens; gradients of all ranks are summed and cut again."""
    return with_gradient(tensor, ranks, _gather_tokens, _reduce_scatter_tokens)


def sum_to_own_tokens(tensor: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """Out of a split layer with sequence parallelism: the sum over ranks, of this rank's tokens."""
    padded = pad_tokens(tensor, ranks)
    return with_gradient(padded, ranks, _reduce_scatter_tokens, _gather_tokens)


def pad_tokens(tensor: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """(…, L, H) with zeros behind, until the ranks divide the number of tokens."""
    missing = -tensor.shape[-2] % ranks.size
    if missing == 0:
        return tensor
    return F.pad(tensor, (0, 0, 0, missing))


def all_reduce(tensor: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """The sum over ranks, in a new tensor."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=ranks.group)
    return total


def _all_reduce_precisely(tensor: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return all_reduce(wide, ranks).to(tensor.dtype)


def _identity_view(tensor: torch.Tensor, _ranks: TensorRanks) -> torch.Tensor:
    return tensor.view_as(tensor)


def _gather_tokens(tensor: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    # Never a view: sharding puts its hooks on what blocks return, and models write into it.
    *rows, tokens, width = tensor.shape
    whole = tensor.new_empty(*rows, ranks.size * tokens, width)
    # Ranks come one behind the other: of one row that is the result, of several it has to be taken apart.
    parts = whole if math.prod(rows) == 1 else torch.empty_like(whole)
    all_gather_single(
        parts.view(ranks.size * tokens * math.prod(rows), width), tensor.reshape(-1, width), group=ranks.group
    )
    if parts is not whole:
        torch.cat(parts.view(ranks.size, *tensor.shape).unbind(0), dim=-2, out=whole)
    return whole


def _reduce_scatter_tokens(tensor: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    width = tensor.shape[-1]
    parts = torch.stack(tensor.chunk(ranks.size, dim=-2))
    own = tensor.new_empty(parts.shape[1:])
    reduce_scatter_single(own.view(-1, width), parts.view(-1, width), group=ranks.group)
    return own


def _own_tokens(tensor: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    return tensor.chunk(ranks.size, dim=-2)[ranks.rank].contiguous()


def _gather_last(tensor: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(ranks.size)]
    dist.all_gather(parts, tensor.contiguous(), group=ranks.group)
    return torch.cat(parts, dim=-1)


def _own_last(tensor: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    return tensor.chunk(ranks.size, dim=-1)[ranks.rank].contiguous()


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
