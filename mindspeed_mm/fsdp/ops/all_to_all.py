"""What ranks send to each other, each to each, with the gradient that belongs to it: it takes the same way back."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx


def exchange_rows(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Rows to all ranks and rows from them, with gradients.

    Args:
        rows: (S, …), those for rank 0, then those for rank 1, …
        send: Rows for each rank; they sum to S.
        receive: Rows from each rank.
        group: The ranks.

    Returns:
        (sum of `receive`, …), those from rank 0 first.
    """
    exchanged: Tensor = _AllToAll.apply(rows, list(send), list(receive), group)  # type: ignore[no-untyped-call]
    return exchanged


def exchange_parts(
    outgoing: Sequence[Tensor], incoming: Sequence[Sequence[int]], group: dist.ProcessGroup | None
) -> list[Tensor]:
    """One tensor to each rank and one from each, with gradients. They may differ in shape.

    Args:
        outgoing: By rank.
        incoming: The shapes of those that come, by rank.
        group: The ranks.
    """
    flat = torch.cat([part.reshape(-1) for part in outgoing])
    send = [part.numel() for part in outgoing]
    receive = list(map(prod, incoming))
    received = exchange_rows(flat, send, receive, group).split(receive)
    return [part.view(*shape) for part, shape in zip(received, incoming, strict=True)]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.sizes, ctx.group = (send, receive), group
        return _all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        send, receive = ctx.sizes
        return _all_to_all(gradients[0], receive, send, ctx.group), None, None, None


def _all_to_all(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None) -> Tensor:
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
    return received
