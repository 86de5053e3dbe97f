"""Ulysses: an all-to-all gives each rank all tokens for some of the heads, and another takes it back (Jacobs et al.
2023, arXiv 2309.14509). Lengths and heads need not divide: both all-to-alls are uneven.

Shapes: B rows, T tokens of this rank, L tokens of all ranks of the group, H heads, h heads of this rank, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_mm.fsdp.ops.context_attention.layout import even_bounds


@dataclass(frozen=True)
class HeadShares:
    """Which heads each rank computes."""

    query: tuple[tuple[int, ...], ...]
    """By rank: query heads, each on one rank."""
    key: tuple[tuple[int, ...], ...]
    """By rank: the key-value heads that its query heads read; one may be on several ranks."""
    group_size: int
    """Query heads to a key-value head."""

    def key_of_query(self, rank: int) -> list[int] | None:
        """For each query head of a rank, the place of its key-value head among those that it holds. None: as kernels
        take it anyway, equally many query heads to each, in order."""
        own = self.key[rank]
        places = [own.index(head // self.group_size) for head in self.query[rank]]
        # What kernels of grouped queries assume: query head number n reads key-value head n // each.
        each = max(1, len(places) // max(1, len(own)))
        assumed = [place // each for place in range(len(places))]
        return None if places == assumed else places


def share_heads(heads: int, key_heads: int, ranks: int) -> HeadShares:
    """Any number of heads over any number of ranks; with fewer heads than ranks, some compute none."""
    group_size = heads // key_heads
    query, key = [], []
    for start, stop in even_bounds(heads, ranks):
        own = range(start, stop)
        query.append(tuple(own))
        key.append(tuple(sorted({head // group_size for head in own})))
    return HeadShares(tuple(query), tuple(key), group_size)


def scatter_heads(
    x_BTHD: Tensor, lengths: Sequence[int], heads: Sequence[Sequence[int]], group: dist.ProcessGroup
) -> Tensor:
    """(B, T, H, D) → (B, L, h, D).

    Args:
        x_BTHD: Own tokens, all heads.
        lengths: Tokens on each rank.
        heads: Heads that each rank gets; one may go to several.
        group: The ranks.
    """
    B, T, _, D = x_BTHD.shape
    own = len(heads[group.rank()])
    # Flat, in the order of ranks: what goes to one rank has another shape than what goes to the next.
    outgoing = torch.cat([x_BTHD[:, :, list(share)].reshape(-1) for share in heads])
    sent = [B * T * len(share) * D for share in heads]
    incoming = [B * length * own * D for length in lengths]
    received = _exchange(outgoing, sent, incoming, group).split(incoming)
    parts = [part.view(B, length, own, D) for part, length in zip(received, lengths, strict=True)]
    return torch.cat(parts, dim=1)


def gather_heads(
    x_BLhD: Tensor, lengths: Sequence[int], heads: Sequence[Sequence[int]], group: dist.ProcessGroup
) -> Tensor:
    """(B, L, h, D) → (B, T, H, D): undoes `scatter_heads` where each head is on one rank, in order."""
    B, _, own, D = x_BLhD.shape
    T = lengths[group.rank()]
    outgoing = torch.cat([part.reshape(-1) for part in x_BLhD.split(list(lengths), dim=1)])
    sent = [B * length * own * D for length in lengths]
    incoming = [B * T * len(share) * D for share in heads]
    received = _exchange(outgoing, sent, incoming, group).split(incoming)
    parts = [part.view(B, T, len(share), D) for part, share in zip(received, heads, strict=True)]
    return torch.cat(parts, dim=2)


def _exchange(outgoing: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    return _AllToAll.apply(outgoing, sent, received, group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outgoing: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return _all_to_all(outgoing, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        sent, received = ctx.sizes
        return _all_to_all(gradients[0], received, sent, ctx.group), None, None, None


def _all_to_all(outgoing: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    incoming = outgoing.new_empty(sum(received))
    dist.all_to_all_single(incoming, outgoing.contiguous(), received, sent, group=group)
    return incoming
