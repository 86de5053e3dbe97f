"""Cross-entropy of a linear layer's outputs without ever holding them.

Rows go through in slices. With the logits of a slice at hand, their gradient (softmax − one-hot of the target) is
formed on the spot and multiplied into the gradients of hidden states and weight: the backward pass has nothing left to
do but to scale them by one number, the gradient of the loss. That fits a loss which is the last thing computed and
whose backward pass runs once; a second one computes the slices again.

Shapes: N rows, H hidden, V words of the vocabulary (under tensor parallelism: this rank's).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

_WIDE_NUMBERS = {"cpu": 2**20}
"""Logits that are held in fp32 at a time, by device: on a host about what its caches hold."""
_WIDE_NUMBERS_ELSEWHERE = 2**26
_WEIGHT_ROWS = 2**12
"""Rows of the weight's gradient that are multiplied at a time where it is summed in a wider type."""


class VocabularyShare(Protocol):
    """A vocabulary of which each rank has a consecutive part of equal size."""

    rank: int

    def largest(self, numbers: Tensor) -> Tensor:
        """The element-wise maximum over ranks."""
        ...

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over ranks, in a new tensor, without gradient."""
        ...

    def token_losses(self, logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        """(N,) cross-entropies and (N,) log Σ exp of whole rows, from this rank's part of them; differentiable once."""
        ...


class LossSums(NamedTuple):
    """What a batch of rows adds to a loss; 0-d, in fp32, or fp64 for fp64 logits. Of weights in S columns: (S,)."""

    loss: Tensor
    """Σ w · (−log p(target))."""
    z_loss: Tensor
    """coefficient · Σ w · (log Σ exp(logits))² (PaLM, arXiv:2204.02311, section 5). From `linear_cross_entropy` it is
    a number to look at: the gradient of both flows through `loss`."""


@dataclass(frozen=True)
class LossPlan:
    """How the rows go through."""

    slice_rows: int
    """Most rows in a slice."""
    z_loss_coef: float = 0.0
    """Weight of the z-loss."""
    behind: Callable[[Tensor], Tensor] | None = None
    """What a model does with its logits, element by element: soft-capping, a scale."""
    vocabulary: VocabularyShare | None = None
    """The other parts of the vocabulary."""

    def finished(self, logits: Tensor) -> Tensor:
        """The logits as the model returns them."""
        if self.behind is None:
            return logits
        return self.behind(logits)

    def slices(self, rows: int) -> Iterator[slice]:
        """One at least, also of no rows: gradients of zero are gradients."""
        for start in range(0, max(rows, 1), self.slice_rows):
            yield slice(start, min(start + self.slice_rows, rows))


def linear_cross_entropy(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    plan: LossPlan,
    *,
    bias_V: Tensor | None = None,
    weights_N: Tensor | None = None,
) -> LossSums:
    """Σ w · cross-entropy of `hidden · weightᵀ + bias`, differentiable in hidden states, weight and bias.

    Sums, exponentials and the weight's gradient are in fp32 (fp64 for fp64). Gradients are formed in the forward pass,
    of what needs one only; none where no gradient is recording.

    Args:
        hidden_NH: (N, H).
        weight_VH: (V, H), of the same dtype.
        targets_N: (N,) ids in the whole vocabulary, none of them ignored.
        plan: How the rows go through.
        bias_V: (V,).
        weights_N: (N,) of the rows; 1 each when None. Where no gradient is recording, also (N, S): a column for each of
            S sums.
    """
    keeps = torch.is_grad_enabled()
    losses = _LinearCrossEntropy.apply(hidden_NH, weight_VH, bias_V, targets_N, weights_N, plan, keeps)
    return LossSums(*losses)  # type: ignore[no-untyped-call]


def recomputed_cross_entropy(
    logits_of: Callable[[Tensor], Tensor],
    hidden_NH: Tensor,
    targets_N: Tensor,
    plan: LossPlan,
    *,
    weights_N: Tensor | None = None,
) -> LossSums:
    """The same for any head: the logits of a slice are computed once more in the backward pass; it reaches both sums.

    Args:
        logits_of: (n, H) → (n, V); its parameters get their gradients by autograd.
        hidden_NH: (N, H).
        targets_N: (N,).
        plan: How the rows go through.
        weights_N: (N,) or (N, S), as above.
    """

    def run(hidden: Tensor, targets: Tensor, weights: Tensor | None) -> LossSums:
        logits = plan.finished(logits_of(hidden))
        return whole_cross_entropy(logits, targets, weights, z_loss_coef=plan.z_loss_coef, vocabulary=plan.vocabulary)

    sums = []
    for part in plan.slices(len(targets_N)):
        inputs = (hidden_NH[part], targets_N[part], _weights_of_rows(weights_N, part))
        if torch.is_grad_enabled():
            sums.append(checkpoint(run, *inputs, use_reentrant=False))
        else:
            sums.append(run(*inputs))
    losses, z_losses = zip(*sums, strict=True)
    return LossSums(torch.stack(losses).sum(dim=0), torch.stack(z_losses).sum(dim=0))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        weights_N: Tensor | None,
        plan: LossPlan,
        keeps: bool,
    ) -> tuple[Tensor, Tensor]:
        inputs = _Inputs(plan, hidden_NH, weight_VH, bias_V, targets_N, weights_N)
        ctx.wanted = tuple(keeps and needed for needed in ctx.needs_input_grad[:3])
        ctx.save_for_backward(*inputs[1:])
        ctx.plan = plan
        sums, ctx.gradients = _pass(inputs, ctx.wanted)
        ctx.mark_non_differentiable(sums.z_loss)
        return tuple(sums)

    @staticmethod
    def backward(ctx: FunctionCtx, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that the forward pass formed, times that of the loss.

        They are scaled in place and given away: a second pass through the same graph forms them again. A pass that is
        to be differentiated itself goes through logits that autograd sees.
        """
        if torch.is_grad_enabled():
            return (*_differentiable_gradients(_Inputs(ctx.plan, *ctx.saved_tensors), ctx.wanted, outer[0]), *_NOTHING)
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            _, gradients = _pass(_Inputs(ctx.plan, *ctx.saved_tensors), ctx.wanted)
        for gradient in gradients:
            if gradient is not None:
                _scale(gradient, outer[0])
        return (*gradients, *_NOTHING)


_NOTHING = (None, None, None, None)
"""Gradients of what has none: targets, weights, plan, whether gradients are kept."""


class _Inputs(NamedTuple):
    plan: LossPlan
    hidden_NH: Tensor
    weight_VH: Tensor
    bias_V: Tensor | None
    targets_N: Tensor
    weights_N: Tensor | None


_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of hidden states, weight and bias."""


def _pass(inputs: _Inputs, wanted: tuple[bool, ...]) -> tuple[LossSums, _Gradients]:
    """The sums, and of what is wanted the gradients of loss + z-loss."""
    plan, hidden_NH, weight_VH, bias_V, targets_N, weights_N = inputs
    rows, wide = len(hidden_NH), wide_dtype(hidden_NH.dtype)
    of_hidden = torch.empty_like(hidden_NH) if wanted[0] else None
    of_weight = torch.zeros_like(weight_VH, dtype=wide) if wanted[1] else None
    of_bias = torch.zeros_like(bias_V, dtype=wide) if wanted[2] and bias_V is not None else None
    losses_N, logsums_N = (hidden_NH.new_empty(rows, dtype=wide) for _ in range(2))
    # One buffer for all slices: `out=` keeps the allocator from holding two slices of logits at a time.
    room_SV = hidden_NH.new_empty(min(plan.slice_rows, rows), len(weight_VH))
    work = _Softmax(plan, weights_N, forms_gradient=any(wanted))
    for part in plan.slices(rows):
        hidden_SH = hidden_NH[part]
        logits_SV = torch.mm(hidden_SH, weight_VH.t(), out=room_SV[: len(hidden_SH)])
        if bias_V is not None:
            logits_SV += bias_V
        work.run(logits_SV, targets_N[part], part, losses_N, logsums_N)
        # `logits_SV` holds the gradient of the logits from here on.
        if of_hidden is not None:
            torch.mm(logits_SV, weight_VH, out=of_hidden[part])
        if of_weight is not None:
            _add_product(of_weight, logits_SV, hidden_SH)
        if of_bias is not None:
            of_bias += logits_SV.sum(dim=0, dtype=wide)
    del room_SV, logits_SV, work  # before the gradients are cast: both together would be the peak
    own_weights = _as(weights_N, losses_N)
    sums = LossSums(_weighed(losses_N, own_weights), plan.z_loss_coef * _weighed(logsums_N.square(), own_weights))
    gradients = of_hidden, _as(of_weight, weight_VH), _as(of_bias, bias_V)
    return sums, gradients


class _Softmax:
    """Turns logits into their gradient, in place and some rows at a time: these alone are held in the wide type."""

    def __init__(self, plan: LossPlan, weights_N: Tensor | None, *, forms_gradient: bool) -> None:
        self._plan, self._weights_N, self._forms_gradient = plan, weights_N, forms_gradient
        self._room: Tensor | None = None

    def run(self, logits_SV: Tensor, targets_S: Tensor, part: slice, losses_N: Tensor, logsums_N: Tensor) -> None:
        """Fill in the losses and log Σ exp of these rows; leave the gradient in `logits_SV`."""
        weights_S = _as(_weights_of_rows(self._weights_N, part), losses_N)
        losses_S, logsums_S = losses_N[part], logsums_N[part]
        at_a_time = max(1, _wide_numbers(logits_SV) // max(1, logits_SV.shape[1]))
        if self._plan.vocabulary is not None:  # fewer collectives
            at_a_time = max(1, len(logits_SV))
        for start in range(0, len(logits_SV), at_a_time):
            few = slice(start, start + at_a_time)
            weights_R = _weights_of_rows(weights_S, few)
            losses_S[few], logsums_S[few] = self._rows(logits_SV[few], targets_S[few], weights_R, losses_N.dtype)

    def _rows(
        self, logits_RV: Tensor, targets_R: Tensor, weights_R: Tensor | None, wide: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        behind = self._plan.behind
        if behind is None:
            losses_R, logsums_R, gradient_RV = self._outputs(logits_RV, targets_R, weights_R, wide)
        else:
            # Autograd for the few operations behind the head; a clone, since the slice's own memory takes the gradient.
            with torch.set_grad_enabled(self._forms_gradient):
                own_RV = logits_RV.detach().clone().requires_grad_(self._forms_gradient)
                final_RV = behind(own_RV)
            losses_R, logsums_R, gradient_RV = self._outputs(final_RV.detach(), targets_R, weights_R, wide)
            if self._forms_gradient:
                (gradient_RV,) = torch.autograd.grad(final_RV, own_RV, gradient_RV.to(final_RV.dtype))
        if self._forms_gradient:
            logits_RV.copy_(gradient_RV)
        return losses_R, logsums_R

    def _outputs(
        self, final_RV: Tensor, targets_R: Tensor, weights_R: Tensor | None, wide: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Losses, log Σ exp, and the gradient of Σ w · (loss + coefficient · (log Σ exp)²)."""
        softmax = self._whole if self._plan.vocabulary is None else self._shared
        losses_R, logsums_R, own, here, probabilities_RV = softmax(final_RV, targets_R, wide)
        if self._forms_gradient:
            # d(−log p_t)/dz = p − 1[t] and d(lse²)/dz = 2 · lse · p: both hold the probabilities times a number of the
            # row, and only the first has the target's one-hot to take off. A factor of 1 is left out: multiplying is
            # one more pass over all logits.
            factor_R = weights_R
            if self._plan.z_loss_coef:
                factor_R = 1 + 2 * self._plan.z_loss_coef * logsums_R
                if weights_R is not None:
                    factor_R = weights_R * factor_R
            if weights_R is not None:
                here = here * weights_R.unsqueeze(1)
            if factor_R is not None:
                probabilities_RV *= factor_R.unsqueeze(1)
            probabilities_RV.scatter_add_(1, own, -here)
        return losses_R, logsums_R, probabilities_RV

    def _whole(self, final_RV: Tensor, targets_R: Tensor, wide: torch.dtype) -> tuple[Tensor, ...]:
        own = targets_R.unsqueeze(1)
        # The first rows are the most: all later ones fit.
        if self._room is None or self._room.shape[0] < len(final_RV):
            self._room = final_RV.new_empty(final_RV.shape, dtype=wide)
        probabilities_RV = torch.softmax(final_RV, 1, dtype=wide, out=self._room[: len(final_RV)])
        # One pass for exponentials: their sum follows from the largest probability, which is never small.
        logsums_R = final_RV.amax(dim=1).to(wide) - probabilities_RV.amax(dim=1).log()
        losses_R = logsums_R - final_RV.gather(1, own).squeeze(1).to(wide)
        return losses_R, logsums_R, own, torch.ones_like(own, dtype=wide), probabilities_RV

    def _shared(self, final_RV: Tensor, targets_R: Tensor, wide: torch.dtype) -> tuple[Tensor, ...]:
        vocabulary = self._plan.vocabulary
        assert vocabulary is not None
        # A target of another rank points at word 0 here, and its share of the sum is masked.
        own = targets_R - vocabulary.rank * final_RV.shape[1]
        elsewhere = (own < 0) | (own >= final_RV.shape[1])
        own = own.masked_fill(elsewhere, 0).unsqueeze(1)
        largest_R = vocabulary.largest(final_RV.amax(dim=1).to(wide))
        shifted_RV = final_RV.to(wide) - largest_R.unsqueeze(1)
        at_target_R = vocabulary.total(shifted_RV.gather(1, own).squeeze(1).masked_fill(elsewhere, 0))
        probabilities_RV = shifted_RV.exp_()
        total_R = vocabulary.total(probabilities_RV.sum(dim=1))
        probabilities_RV /= total_R.unsqueeze(1)
        log_total_R = total_R.log()
        return (
            log_total_R - at_target_R,
            log_total_R + largest_R,
            own,
            (~elsewhere).to(wide).unsqueeze(1),
            probabilities_RV,
        )


def _differentiable_gradients(inputs: _Inputs, wanted: tuple[bool, ...], outer: Tensor) -> list[Tensor | None]:
    """The gradients as functions of inputs and outer gradient; all logits are held for it."""
    plan, hidden_NH, weight_VH, bias_V, targets_N, weights_N = inputs
    if plan.vocabulary is not None:
        raise NotImplementedError("second derivatives of a loss whose vocabulary is cut over ranks")
    logits_NV = F.linear(hidden_NH, weight_VH, bias_V)
    sums = whole_cross_entropy(plan.finished(logits_NV), targets_N, weights_N, z_loss_coef=plan.z_loss_coef)
    needed = [place for place, is_wanted in enumerate(wanted) if is_wanted]
    differentiated = [inputs[1:][place] for place in needed]
    found = torch.autograd.grad(sums.loss + sums.z_loss, differentiated, outer, create_graph=True)
    gradients: list[Tensor | None] = [None] * len(wanted)
    for place, gradient in zip(needed, found, strict=True):
        gradients[place] = gradient
    return gradients


def whole_cross_entropy(
    logits_NV: Tensor,
    targets_N: Tensor,
    weights_N: Tensor | None = None,
    *,
    z_loss_coef: float = 0.0,
    vocabulary: VocabularyShare | None = None,
) -> LossSums:
    """The sums from logits that are there, in fp32 at least; autograd differentiates both."""
    logits_NV = logits_NV.to(wide_dtype(logits_NV.dtype))
    own_N = _as(weights_N, logits_NV)
    if vocabulary is not None:
        losses_N, logsums_N = vocabulary.token_losses(logits_NV, targets_N)
        return LossSums(_weighed(losses_N, own_N), z_loss_coef * _weighed(logsums_N.square(), own_N))
    if own_N is None:
        loss = F.cross_entropy(logits_NV, targets_N, reduction="sum")
    else:
        loss = _weighed(F.cross_entropy(logits_NV, targets_N, reduction="none"), own_N)
    if not z_loss_coef:  # one pass over the logits less
        return LossSums(loss, torch.zeros_like(loss))
    return LossSums(loss, z_loss_coef * _weighed(logits_NV.logsumexp(dim=1).square(), own_N))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a loss is computed in: fp32 at least."""
    return torch.promote_types(dtype, torch.float32)


_computes_on: ContextVar[str | None] = ContextVar("_computes_on", default=None)


@contextmanager
def as_computed_on(device_type: str) -> Iterator[None]:
    """Inside, rows go through as on such a device: what a simulation without it needs to know."""
    token = _computes_on.set(device_type)
    try:
        yield
    finally:
        _computes_on.reset(token)


def _wide_numbers(tensor: Tensor) -> int:
    return _WIDE_NUMBERS.get(_computes_on.get() or tensor.device.type, _WIDE_NUMBERS_ELSEWHERE)


def _weighed(numbers_N: Tensor, weights_N: Tensor | None) -> Tensor:
    """One sum; of weights in columns one for each of them."""
    if weights_N is None:
        return numbers_N.sum()
    if weights_N.dim() == 1:
        return (numbers_N * weights_N).sum()
    return numbers_N @ weights_N


def _weights_of_rows(weights: Tensor | None, rows: slice) -> Tensor | None:
    if weights is None:
        return None
    return weights[rows]


def _add_product(total_VH: Tensor, gradient_SV: Tensor, hidden_SH: Tensor) -> None:
    """total += gradientᵀ · hidden; slices add up in the wide type, or a small one would lose those that come late."""
    if total_VH.dtype == gradient_SV.dtype:
        total_VH.addmm_(gradient_SV.t(), hidden_SH)
        return
    for start in range(0, len(total_VH), _WEIGHT_ROWS):
        few = slice(start, start + _WEIGHT_ROWS)
        total_VH[few] += gradient_SV[:, few].t() @ hidden_SH


def _as(tensor: Tensor | None, like: Tensor | None) -> Tensor | None:
    """In the other's type, where there are both."""
    if tensor is None or like is None:
        return tensor
    return tensor.to(like.dtype)


def _scale(gradient: Tensor, factor: Tensor) -> None:
    """In place; the factor is not rounded to a short type."""
    if gradient.dtype == factor.dtype:
        gradient.mul_(factor)
        return
    for few in gradient.split(_WEIGHT_ROWS):
        few.copy_(few.to(factor.dtype) * factor)
