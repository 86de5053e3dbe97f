"""The attention layer of a spread sequence: Ulysses outside, the ring inside, each only where it has ranks.

Ulysses: an all-to-all gives each rank all tokens for some of the heads, and another takes it back (Jacobs et al. 2023,
arXiv 2309.14509). Lengths and heads need not divide: both all-to-alls are uneven.

Ring: keys and values go round, partial outputs are merged by their log-sum-exp (Liu et al. 2023, arXiv 2310.01889). A
ring of one rank is plain attention by rectangles.

Shapes: B rows, T own tokens (queries), S own keys, L tokens of all ranks of the group, H heads, h heads of this rank, K
key-value heads, D head width, Dv width of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from mindspeed_mm.fsdp.ops.collectives import exchange_parts
from mindspeed_mm.fsdp.ops.context_attention.block_kernels import NEVER, BlockKernel, kernel_for
from mindspeed_mm.fsdp.ops.context_attention.layout import (
    LayoutError,
    Rectangle,
    SequenceLayout,
    even_bounds,
    plan_rectangles,
)


@dataclass(frozen=True, eq=False)
class ContextGroups:
    """The ranks that share a sequence. A group of None has one rank."""

    ring: dist.ProcessGroup | None = None
    """Ranks that pass keys and values round."""
    ulysses: dist.ProcessGroup | None = None
    """Ranks that exchange heads."""
    everyone: dist.ProcessGroup | None = None
    """Both together, ring rank by ring rank."""

    @property
    def ring_size(self) -> int:
        """Number of ranks in the ring; 1 without a group."""
        if self.ring is None:
            return 1
        return self.ring.size()

    @property
    def ring_rank(self) -> int:
        """Place of this rank in the ring, counted from 0."""
        if self.ring is None:
            return 0
        return self.ring.rank()

    @property
    def ulysses_size(self) -> int:
        """Number of ranks that exchange heads; 1 without a group."""
        if self.ulysses is None:
            return 1
        return self.ulysses.size()

    @property
    def ulysses_rank(self) -> int:
        """Place of this rank among those that exchange heads, counted from 0."""
        if self.ulysses is None:
            return 0
        return self.ulysses.rank()


def context_attention(
    q_BTHD: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    groups: ContextGroups,
    queries: SequenceLayout,
    keys: SequenceLayout | None,
    *,
    causal: bool = False,
    scale: float | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Exact attention of own queries to the keys of all ranks, (B, T, H, Dv).

    Gradients of parameters on this rank are those of its own tokens: summed over the ranks they are the whole.

    Args:
        q_BTHD: Queries of own tokens, in the order of `queries`.
        k_BSKD: Keys of own tokens; K divides H.
        v_BSKD: Values.
        groups: Who shares the sequence.
        queries: Where the queries lie.
        keys: Where the keys lie; the same object for self-attention. None: every rank holds all keys (the text of a
            cross-attention), and nothing is communicated.
        causal: A token sees itself and those before it in its document.
        scale: Factor on the scores; default 1 / √D.
        key_mask: (B, keys of all ranks) bool, the same on all ranks; False hides a key from everyone.

    Raises:
        LayoutError: A tensor does not have the tokens that its layout gives this rank.
    """
    if scale is None:
        scale = q_BTHD.shape[-1] ** -0.5
    if keys is None:
        return _attend_to_all(q_BTHD, k_BSKD, v_BSKD, scale, key_mask)
    check_lengths(q_BTHD, queries, groups)
    check_lengths(k_BSKD, keys, groups)
    if groups.ulysses_size == 1:
        return _attend_on_ring(q_BTHD, k_BSKD, v_BSKD, groups, queries, keys, causal, scale, key_mask)
    assert groups.ulysses is not None
    shares = share_heads(q_BTHD.shape[2], k_BSKD.shape[2], groups.ulysses_size)
    query_lengths, key_lengths = queries.piece_lengths(groups.ring_rank), keys.piece_lengths(groups.ring_rank)
    q = scatter_heads(q_BTHD, query_lengths, shares.query, groups.ulysses)
    k, v = _scatter_keys(k_BSKD, v_BSKD, key_lengths, shares, groups.ulysses)
    out = _attend_on_ring(q, k, v, groups, queries, keys, causal, scale, key_mask)
    return gather_heads(out, query_lengths, shares.query, groups.ulysses)


def attend_to_whole(
    q_BTHD: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    groups: ContextGroups,
    layout: SequenceLayout,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Self-attention of any pattern, (B, T, H, D): `attend` is given all tokens in their order, for this rank's heads.

    Args:
        q_BTHD: Queries of own tokens.
        k_BTKD: Keys; K divides H.
        v_BTKD: Values.
        groups: Who shares the sequence by heads alone.
        layout: Where its tokens lie: one run a rank.
        attend: Queries (B, L, h, D), keys and values (B, L, k, D), k divides h → (B, L, h, D).

    Raises:
        LayoutError: Ranks pass keys round, too, so that none has all tokens; a tensor does not have the own tokens.
    """
    if groups.ulysses is None or groups.ring_size > 1:
        raise LayoutError("attention of a pattern takes all tokens, and ranks of a ring have some of them each")
    check_lengths(q_BTHD, layout, groups)
    shares, lengths = share_heads(q_BTHD.shape[2], k_BTKD.shape[2], groups.ulysses_size), layout.piece_lengths(0)
    if shares.group_size == 1:  # one exchange for all three
        whole = scatter_heads(
            torch.stack([q_BTHD, k_BTKD, v_BTKD], dim=-1).flatten(3), lengths, shares.query, groups.ulysses
        )
        out = attend(*whole.unflatten(3, (-1, 3)).unbind(-1))
    else:
        q = scatter_heads(q_BTHD, lengths, shares.query, groups.ulysses)
        out = attend(q, *_scatter_keys(k_BTKD, v_BTKD, lengths, shares, groups.ulysses))
    return gather_heads(out, lengths, shares.query, groups.ulysses)


def check_lengths(x_BTHD: Tensor, layout: SequenceLayout, groups: ContextGroups) -> None:
    """Raise `LayoutError` unless a tensor has as many tokens as its layout gives this rank."""
    expected = layout.piece_lengths(groups.ring_rank)[groups.ulysses_rank]
    if x_BTHD.shape[1] != expected:
        raise LayoutError(
            f"{x_BTHD.shape[1]} tokens came to attention, but the layout gives this rank {expected} of {layout.length}",
            way_out="Every input along the sequence has to be cut by the same layout.",
        )


def _attend_on_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: ContextGroups,
    queries: SequenceLayout,
    keys: SequenceLayout,
    causal: bool,
    scale: float,
    key_mask: Tensor | None,
) -> Tensor:
    biases = None
    if key_mask is not None:
        biases = [_bias(key_mask[:, _tokens_of(keys, source)], q.dtype) for source in range(keys.ring_size)]
    rectangles = plan_rectangles(queries, keys, groups.ring_rank, causal)
    kernel = kernel_for(q, v, masked=key_mask is not None)
    call = RingCall(rectangles, keys.ring_lengths(), biases, kernel, scale, groups.ring)
    return ring_attention(q, k, v, call)


def _attend_to_all(q: Tensor, k: Tensor, v: Tensor, scale: float, key_mask: Tensor | None) -> Tensor:
    rectangles: list[Rectangle] = []
    if q.shape[1] and k.shape[1]:
        rectangles.append(Rectangle(0, q.shape[1], 0, k.shape[1], False))
    biases = None
    if key_mask is not None:
        biases = [_bias(key_mask, q.dtype)]
    kernel = kernel_for(q, v, masked=key_mask is not None)
    return ring_attention(q, k, v, RingCall([rectangles], [k.shape[1]], biases, kernel, scale))


def _tokens_of(layout: SequenceLayout, ring_rank: int) -> list[int]:
    tokens: list[int] = []
    for ulysses_rank in range(len(layout.pieces[ring_rank])):
        tokens += layout.positions(ring_rank, ulysses_rank)
    return tokens


def _bias(mask_BS: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, 1, 1, S): 0 for a key that is seen, −∞ for one that is not."""
    zeros = torch.zeros(mask_BS.shape, dtype=dtype, device=mask_BS.device)
    return zeros.masked_fill(~mask_BS, NEVER)[:, None, None]


# --- Ulysses: heads over ranks ----------------------------------------------------------------------------------------


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
        if places == assumed:
            return None
        return places


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


def _scatter_keys(
    k_BTKD: Tensor, v_BTKD: Tensor, lengths: Sequence[int], shares: HeadShares, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Keys and values (B, L, k, D) for this rank's query heads; k divides their number."""
    kv = scatter_heads(torch.cat([k_BTKD, v_BTKD], dim=-1), lengths, shares.key, group)
    places = shares.key_of_query(group.rank())
    if places is not None:
        kv = kv[:, :, places]
    k, v = kv.split([k_BTKD.shape[-1], v_BTKD.shape[-1]], dim=-1)
    return k, v


def gather_heads(
    x_BLhD: Tensor, lengths: Sequence[int], heads: Sequence[Sequence[int]], group: dist.ProcessGroup
) -> Tensor:
    """(B, L, h, D) → (B, T, H, D): undoes `scatter_heads` where each head is on one rank, in order."""
    B, _, _, D = x_BLhD.shape
    T = lengths[group.rank()]
    incoming = [(B, T, len(share), D) for share in heads]
    return torch.cat(exchange_parts(x_BLhD.split(list(lengths), dim=1), incoming, group), dim=2)


@dataclass(frozen=True, eq=False)
class RingCall:
    """What one call of attention does on this rank."""

    rectangles: Sequence[Sequence[Rectangle]]
    """By ring rank of the keys."""
    key_lengths: Sequence[int]
    """Tokens of keys on each ring rank."""
    biases: Sequence[Tensor] | None
    """By ring rank of the keys: (B, 1, 1, S) for `BlockKernel`, or None."""
    kernel: BlockKernel
    scale: float
    group: dist.ProcessGroup | None = None
    """None: a ring of one."""

    @property
    def size(self) -> int:
        """Number of ranks in the ring; 1 without a group."""
        if self.group is None:
            return 1
        return self.group.size()

    @property
    def rank(self) -> int:
        """Place of this rank in the ring, counted from 0."""
        if self.group is None:
            return 0
        return self.group.rank()

    def neighbour(self, steps: int) -> int:
        """Global rank of the one so many places on."""
        assert self.group is not None
        return dist.get_global_rank(self.group, (self.rank + steps) % self.size)

    def bias(self, source: int, rectangle: Rectangle) -> Tensor | None:
        """Bias of the keys of a rectangle."""
        if self.biases is None:
            return None
        return self.biases[source][..., rectangle.k_start : rectangle.k_stop]


def ring_attention(q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, call: RingCall) -> Tensor:
    """(B, T, H, Dv). Every rank of the ring calls it, and its backward, in the same order."""
    return _RingAttention.apply(q_BTHD, k_BSKD, v_BSKD, call)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, call: RingCall) -> Tensor:
        exact = torch.promote_types(q.dtype, torch.float32)
        width = k.shape[-1]
        total = torch.zeros(*q.shape[:3], v.shape[-1], dtype=exact, device=q.device)
        lse = torch.full(q.shape[:3], NEVER, dtype=exact, device=q.device)
        for source, kv in _rotating(torch.cat([k, v], dim=-1), call):
            for rectangle in _work(call.rectangles[source], q):
                rows, keys = _slices(rectangle)
                part, part_lse = call.kernel.forward(
                    q[:, rows], kv[:, keys, :, :width], kv[:, keys, :, width:], call.bias(source, rectangle),
                    causal=rectangle.causal, scale=call.scale,
                )  # fmt: skip
                merge_(total[:, rows], lse[:, rows], part, part_lse)
        out = total.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        call: RingCall = ctx.call
        grad = gradients[0].contiguous()
        exact, width = torch.promote_types(q.dtype, torch.float32), k.shape[-1]
        dq = torch.zeros(q.shape, dtype=exact, device=q.device)
        home: Tensor | None = None
        travelling: _RingExchange | None = None
        for source, kv in _rotating(torch.cat([k, v], dim=-1), call):
            dkv = torch.zeros(kv.shape, dtype=exact, device=q.device)
            for rectangle in _work(call.rectangles[source], q):
                rows, keys = _slices(rectangle)
                parts = call.kernel.backward(
                    grad[:, rows], q[:, rows], kv[:, keys, :, :width], kv[:, keys, :, width:],
                    out[:, rows], lse[:, rows], call.bias(source, rectangle),
                    causal=rectangle.causal, scale=call.scale,
                )  # fmt: skip
                dq[:, rows] += parts[0]
                dkv[:, keys, :, :width] += parts[1]
                dkv[:, keys, :, width:] += parts[2]
            # Sums travel one step behind their keys; the own part stays at home and makes one hop less.
            if home is None:
                home = dkv
                continue
            if travelling is not None:
                dkv += travelling.wait()
            travelling = _RingExchange(dkv, call.key_lengths[(source - 1) % call.size], call)
        assert home is not None
        if travelling is not None:
            home += travelling.wait()
        return dq.to(q.dtype), home[..., :width].to(k.dtype), home[..., width:].to(v.dtype), None


def merge_(total: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a partial output to `total` (B, T, H, Dv) and its weight to `lse` (B, T, H), in place: with
    m = log(eˡ + eᵖ), out = out · e^(l − m) + part · e^(p − m)."""
    merged = torch.logaddexp(lse, part_lse)
    # Where neither has seen a key, −∞ − (−∞) would be NaN.
    nothing = merged == NEVER
    old, new = ((weight - merged).exp().masked_fill(nothing, 0).unsqueeze(-1) for weight in (lse, part_lse))
    total.mul_(old).add_(part.to(total.dtype) * new)
    lse.copy_(merged)


def _rotating(kv: Tensor, call: RingCall) -> Iterator[tuple[int, Tensor]]:
    """(ring rank, its keys and values), the own first. The next arrive while the caller computes."""
    kv = kv.contiguous()
    for step in range(call.size):
        source = (call.rank - step) % call.size
        is_last = step == call.size - 1
        exchange = None if is_last else _RingExchange(kv, call.key_lengths[(source - 1) % call.size], call)
        yield source, kv
        if exchange is not None:
            kv = exchange.wait()


class _RingExchange:
    """A tensor goes to the next rank while another comes from the one before. Both are kept until it is done."""

    def __init__(self, outgoing: Tensor, length: int, call: RingCall) -> None:
        self._outgoing = outgoing
        self._incoming = outgoing.new_empty(outgoing.shape[0], length, *outgoing.shape[2:])
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._outgoing, call.neighbour(1), call.group),
                dist.P2POp(dist.irecv, self._incoming, call.neighbour(-1), call.group),
            ]
        )

    def wait(self) -> Tensor:
        """Wait for both transfers and return the tensor of the rank before."""
        for work in self._works:
            work.wait()
        return self._incoming


def _work(rectangles: Sequence[Rectangle], q_BTHD: Tensor) -> Sequence[Rectangle]:
    """Nothing where this rank has no head or no row; the exchanges go on all the same."""
    if q_BTHD.shape[0] and q_BTHD.shape[2]:
        return rectangles
    return ()


def _slices(rectangle: Rectangle) -> tuple[slice, slice]:
    return slice(rectangle.q_start, rectangle.q_stop), slice(rectangle.k_start, rectangle.k_stop)
