"""The log-probability of each target, from logits or in slices of which the logits are computed again in backward.

Losses that compare whole answers (preferences, policy gradients) weigh rows by what comes out here, so that no gradient
can be formed in the forward pass as `linear_cross_entropy` does for a sum.

Shapes: N rows, H hidden, V words of the vocabulary (under tensor parallelism: this rank's).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from mindspeed_mm.fsdp.ops.linear_cross_entropy import LossPlan, VocabularyShare, wide_dtype


def token_log_probs(
    logits_NV: Tensor,
    targets_N: Tensor,
    *,
    suppressed: Tensor | None = None,
    temperature: float = 1.0,
    vocabulary: VocabularyShare | None = None,
    with_entropy: bool = False,
) -> Tensor:
    """(N,) log softmax(logits)[target], in fp32 at least; differentiable.

    Args:
        logits_NV: (N, V).
        targets_N: (N,) ids in the whole vocabulary.
        suppressed: (S,) ids in the whole vocabulary that are left out of the softmax, as if their logits were -∞.
        temperature: Logits are divided by it.
        vocabulary: The other ranks' parts.
        with_entropy: Return (N, 2): beside it the entropy of the row's softmax, in nats.
    """
    logits_NV = logits_NV.to(wide_dtype(logits_NV.dtype))
    if temperature != 1:
        logits_NV = logits_NV / temperature
    if suppressed is not None and len(suppressed):
        own = suppressed
        if vocabulary is not None:
            own = suppressed - vocabulary.rank * logits_NV.shape[1]
            own = own[(own >= 0) & (own < logits_NV.shape[1])]
        logits_NV = logits_NV.index_fill(1, own, -torch.inf)
    if vocabulary is not None:
        log_probs_N = -vocabulary.token_losses(logits_NV, targets_N)[0]
    else:
        log_probs_N = -F.cross_entropy(logits_NV, targets_N, reduction="none")
    if not with_entropy:
        return log_probs_N
    return torch.stack([log_probs_N, _RowEntropy.apply(logits_NV, vocabulary)], dim=1)  # type: ignore[no-untyped-call]


def recomputed_log_probs(
    logits_of: Callable[[Tensor], Tensor],
    hidden_NH: Tensor,
    targets_N: Tensor,
    plan: LossPlan,
    *,
    suppressed: Tensor | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> Tensor:
    """The same for rows that go through a head in slices: the logits of a slice are computed once more in the backward
    pass.

    Args:
        logits_of: (n, H) → (n, V); its parameters get their gradients by autograd.
        hidden_NH: (N, H).
        targets_N: (N,).
        plan: How the rows go through; it has no z-loss.
        suppressed: As above.
        temperature: As above.
        with_entropy: As above.
    """

    def run(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = plan.behind(logits_of(hidden)) if plan.behind else logits_of(hidden)
        return token_log_probs(
            logits,
            targets,
            suppressed=suppressed,
            temperature=temperature,
            vocabulary=plan.vocabulary,
            with_entropy=with_entropy,
        )

    found = []
    for part in plan.slices(len(targets_N)):
        inputs = hidden_NH[part], targets_N[part]
        found.append(checkpoint(run, *inputs, use_reentrant=False) if torch.is_grad_enabled() else run(*inputs))
    return torch.cat(found)


class _RowEntropy(torch.autograd.Function):
    """(N,) −Σ p log p over the vocabulary of all ranks; its gradient by a logit is −p (log p + entropy), 0 where the
    logit is −∞."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits_NV: Tensor, vocabulary: VocabularyShare | None) -> Tensor:
        largest_N = logits_NV.amax(dim=1)
        if vocabulary is not None:
            largest_N = vocabulary.largest(largest_N)
        shifted_NV = logits_NV - largest_N.unsqueeze(1)
        exponentials_N = shifted_NV.exp().sum(dim=1)
        if vocabulary is not None:
            exponentials_N = vocabulary.total(exponentials_N)
        log_probs_NV = shifted_NV - exponentials_N.log().unsqueeze(1)
        probabilities_NV = log_probs_NV.exp()
        weighted_NV = log_probs_NV.masked_fill_(probabilities_NV == 0, 0).mul_(probabilities_NV)
        entropy_N = -weighted_NV.sum(dim=1)
        if vocabulary is not None:
            entropy_N = vocabulary.total(entropy_N)
        ctx.save_for_backward(probabilities_NV, weighted_NV, entropy_N)
        return entropy_N

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        probabilities_NV, weighted_NV, entropy_N = ctx.saved_tensors
        return -gradients[0].unsqueeze(1) * (weighted_NV + probabilities_NV * entropy_N.unsqueeze(1)), None
