"""Ulysses: an all-to-all gives each rank all tokens for some of the heads, and another takes it back (Jacobs et al.
2023, arXiv 2309.14509). Lengths and heads need not divide: both all-to-alls are uneven.

Shapes: B rows, T tokens of this rank, L tokens of all ranks of the group, H heads, h heads of this rank, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_mm.fsdp.ops.all_to_all import exchange_parts
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
    B, _, _, D = x_BTHD.shape
    own = len(heads[group.rank()])
    outgoing = [x_BTHD[:, :, list(share)] for share in heads]
    incoming = [(B, length, own, D) for length in lengths]
    return torch.cat(exchange_parts(outgoing, incoming, group), dim=1)


def gather_heads(
    x_BLhD: Tensor, lengths: Sequence[int], heads: Sequence[Sequence[int]], group: dist.ProcessGroup
) -> Tensor:
    """(B, L, h, D) → (B, T, H, D): undoes `scatter_heads` where each head is on one rank, in order."""
    B, _, _, D = x_BLhD.shape
    T = lengths[group.rank()]
    incoming = [(B, T, len(share), D) for share in heads]
    return torch.cat(exchange_parts(x_BLhD.split(list(lengths), dim=1), incoming, group), dim=2)
