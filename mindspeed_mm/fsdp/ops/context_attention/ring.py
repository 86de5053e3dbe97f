"""Ring attention: keys and values go round, partial outputs are merged by their log-sum-exp (Liu et al. 2023, arXiv
2310.01889). A ring of one rank is plain attention by rectangles.

Shapes: B rows, T queries and S keys of this rank, H heads, K key-value heads, D head width, Dv width of values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from mindspeed_mm.fsdp.ops.context_attention.block_kernels import NEVER, BlockKernel
from mindspeed_mm.fsdp.ops.context_attention.layout import Rectangle


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
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        """Place of this rank in the ring, counted from 0."""
        return 0 if self.group is None else self.group.rank()

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
    return rectangles if q_BTHD.shape[0] and q_BTHD.shape[2] else ()


def _slices(rectangle: Rectangle) -> tuple[slice, slice]:
    return slice(rectangle.q_start, rectangle.q_stop), slice(rectangle.k_start, rectangle.k_stop)
