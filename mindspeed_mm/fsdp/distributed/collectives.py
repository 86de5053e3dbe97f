"""The ranks along one axis of a mesh, and collectives that have a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn
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
