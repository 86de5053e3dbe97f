"""The ranks along one axis of a mesh, and collectives that have a gradient: what ranks send each to each takes the same
way back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

# Renamed in torch 2.13, where the older names warn.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class AxisRanks:
    """The ranks that share something with this one.

    Args:
        mesh: The one-dimensional mesh of the axis.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """(n,) of each rank → (ranks · n,) of all, in their order; without a gradient."""
        joined = own.new_empty(self.size * own.numel())
        all_gather_single(joined, own, group=self.group)
        return joined

    def __deepcopy__(self, memo: object) -> Self:
        return self  # process groups cannot be copied, and a copied model has the same ranks


Axis = TypeVar("Axis", bound=AxisRanks)
Collective = Callable[[torch.Tensor, Axis], torch.Tensor]
"""A collective of the ranks of one kind of axis, without a gradient."""


def sharded_along(parameter: nn.Parameter, dim: int, ranks: AxisRanks) -> nn.Parameter:
    """The parameter as a DTensor of which this rank holds an equal part along `dim`, on meta or with values."""
    own = parameter.detach().chunk(ranks.size, dim=dim)[ranks.rank].clone(memory_format=torch.contiguous_format)
    split = DTensor.from_local(own, ranks.mesh, [Shard(dim)], run_check=False)
    return nn.Parameter(split, requires_grad=parameter.requires_grad)


def with_gradient(
    tensor: torch.Tensor, ranks: Axis, forward: Collective[Axis], backward: Collective[Axis]
) -> torch.Tensor:
    """`forward(tensor, ranks)`, whose gradient goes through `backward`."""
    result: torch.Tensor = _WithGradient.apply(tensor, ranks, forward, backward)  # type: ignore[no-untyped-call]
    return result


class _WithGradient(torch.autograd.Function):
    """A collective and the one that its gradient takes."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: torch.Tensor, ranks: AxisRanks, forward: Any, backward: Any) -> torch.Tensor:
        ctx.ranks, ctx.backward_collective = ranks, backward
        return forward(tensor, ranks)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        return ctx.backward_collective(gradient, ctx.ranks), None, None, None


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
