"""One rank's share of a spread sequence: what it takes of tensors along the sequence, and how it attends.

The share travels with the batch as a keyword argument of the model call, so that layers that are computed again in the
backward pass find the sequence that they saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from mindspeed_mm.fsdp.ops.context_attention.layer import ContextGroups, context_attention
from mindspeed_mm.fsdp.ops.context_attention.layout import SequenceLayout
from mindspeed_mm.fsdp.utils.device import copied_to

CONTEXT_KEY = "mm_context"
"""Key of a batch, and keyword argument of the model call, that holds the share."""


class ContextShare:
    """What this rank holds of one sequence.

    Args:
        groups: Who shares the sequence.
        layout: Where its tokens lie.
    """

    def __init__(self, groups: ContextGroups, layout: SequenceLayout) -> None:
        self.groups = groups
        self.layout = layout
        self._on_device: dict[torch.device, Tensor] = {}

    @cached_property
    def positions(self) -> Tensor:
        """(T,) int64 places in the sequence of the own tokens, on the host."""
        return torch.tensor(self.layout.positions(self.groups.ring_rank, self.groups.ulysses_rank), dtype=torch.long)

    def positions_on(self, device: torch.device) -> Tensor:
        """The same on a device, sent there once."""
        if device not in self._on_device:
            self._on_device[device] = copied_to(self.positions, device)
        return self._on_device[device]

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """The own tokens of a tensor of the whole sequence. Its gradient is zero at all others: a part of the sum."""
        return whole.index_select(dim, self.positions_on(whole.device))

    def gather(self, own: Tensor, dim: int, *, sum_gradients: bool) -> Tensor:
        """The whole sequence of a tensor of own tokens, on every rank.

        Args:
            own: Own tokens.
            dim: Along which they lie.
            sum_gradients: True where each rank goes on with another part of the whole (media features, of which it
                reads those among its own text): a token's gradient is the sum over ranks. False where all ranks go on
                alike (a loss of the whole): each has the gradients of its own tokens already, and a sum would count
                them once a rank.
        """
        return _Gathered.apply(own, self, dim, sum_gradients)

    def attend(
        self,
        q_BTHD: Tensor,
        k_BTKD: Tensor,
        v_BTKD: Tensor,
        *,
        causal: bool,
        scale: float | None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        """Self-attention of the spread sequence, (B, T, H, Dv); arguments as of `context_attention`."""
        queries = keys = self.layout
        return context_attention(
            q_BTHD, k_BTKD, v_BTKD, self.groups, queries, keys, causal=causal, scale=scale, key_mask=key_mask
        )

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens on each rank, in the order of `groups.everyone`."""
        by_ring_rank = map(self.layout.piece_lengths, range(self.layout.ring_size))
        return list(chain.from_iterable(by_ring_rank))

    def order(self) -> list[int]:
        """Where each token of the sequence stands when the ranks' tokens are put one behind the other."""
        held: list[int] = []
        for ring_rank, pieces in enumerate(self.layout.pieces):
            for ulysses_rank in range(len(pieces)):
                held += self.layout.positions(ring_rank, ulysses_rank)
        places = [0] * len(held)
        for index, token in enumerate(held):
            places[token] = index
        return places


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, own: Tensor, share: ContextShare, dim: int, sum_gradients: bool) -> Tensor:
        ctx.share, ctx.dim, ctx.sum_gradients = share, dim, sum_gradients
        lengths, longest = share.lengths, max(share.lengths)
        # Equal sizes: not every backend gathers uneven ones.
        moved = own.movedim(dim, 0)
        padded = F.pad(moved, (0, 0) * (moved.dim() - 1) + (0, longest - moved.shape[0])).contiguous()
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded, group=share.groups.everyone)
        whole = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
        order = copied_to(torch.tensor(share.order(), dtype=torch.long), own.device)
        # Selected last: sharding warns of modules that return views.
        return whole.movedim(0, dim).index_select(dim, order)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0]
        if not ctx.sum_gradients:
            return ctx.share.take(gradient, ctx.dim), None, None, None
        exact = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.to(exact, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.share.groups.everyone)
        return ctx.share.take(total, ctx.dim).to(gradient.dtype), None, None, None
