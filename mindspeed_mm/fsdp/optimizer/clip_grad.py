"""Gradient norm and clipping for parameters on any mix of meshes: sharded, replicated, plain.

Nothing here waits for the device: the norm is a tensor that the engine reads together with the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from mindspeed_mm.fsdp.optimizer.gradient_offload import offloaded
from mindspeed_mm.fsdp.optimizer.shards import local
from mindspeed_mm.fsdp.utils.device import copied_to

ShardGroups = tuple[dist.ProcessGroup, ...]


@torch.no_grad()
def grad_norm(parameters: Iterable[nn.Parameter], stages: dist.ProcessGroup | None = None) -> torch.Tensor:
    """2-norm of all gradients of the model, as if it lay on one device: √ Σ g².

    Squares are summed over the ranks that hold different shards, and once over those that hold copies.

    Args:
        parameters: The same on every rank. Those without a gradient count as zero, and still take part in what is
            communicated, so that ranks may differ in which they have.
        stages: Ranks of a pipeline, each of which gives its own parameters; a weight that two of them hold is given by
            one.

    Returns:
        A plain 0-d tensor, equal on all ranks; fp64 if any gradient is, else fp32.
    """
    parameters = list(parameters)
    trainable = [p for p in parameters if p.requires_grad]
    if not parameters:
        return torch.zeros(())
    # Of all parameters: the stages of a pipeline, some frozen, must add up the same type.
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
    device = _mesh_device(parameters[0])
    total = torch.zeros((), dtype=dtype, device=device)
    for groups, members in _by_shard_groups(trainable).items():
        squares = _sum_of_squares(members, dtype, device)
        for group in groups:
            dist.all_reduce(squares, group=group)
        total += squares
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


@torch.no_grad()
def clip_grads_(
    parameters: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float, foreach: bool | None = None
) -> None:
    """Scale gradients in place by min(1, max_norm / (norm + 1e-6)), without reading the norm.

    Args:
        parameters: Parameters whose gradients `norm` was taken of.
        norm: From `grad_norm`.
        max_norm: Upper bound of the norm afterwards.
        foreach: Scale many gradients in one call; None and True are the same, False goes one by one.
    """
    parameters = list(parameters)
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for kept in filter(None, map(offloaded, parameters)):
        own = scale.to(kept.norm.device)  # where the computation will be
        kept.factor = own if kept.factor is None else kept.factor * own
    for device, same_device in _by_device(gradients).items():
        factor = scale.to(device)
        if foreach is False:
            for gradient in same_device:
                gradient.mul_(factor)
        else:
            torch._foreach_mul_(same_device, factor)


@torch.no_grad()
def unscale_grads_(parameters: Iterable[nn.Parameter], divisor: float | torch.Tensor) -> None:
    """Divide gradients in place by what the loss was multiplied by, before their norm is taken. Overflown ones stay
    infinite or not a number, so the norm tells of them.

    Args:
        parameters: Those without a gradient are passed over.
        divisor: A number, or a plain 0-d tensor, which is not read.
    """
    parameters, factor = list(parameters), 1 / divisor
    for kept in filter(None, map(offloaded, parameters)):
        kept.factor = torch.ones_like(kept.norm).mul_(factor)
        kept.norm = kept.norm * kept.factor
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    for device, same_device in _by_device(gradients).items():
        torch._foreach_mul_(same_device, factor.to(device) if isinstance(factor, torch.Tensor) else factor)


def _by_shard_groups(parameters: Sequence[nn.Parameter]) -> dict[ShardGroups, list[nn.Parameter]]:
    """Parameters by the process groups over which they are cut; none for plain and replicated ones."""
    by_layout: dict[tuple[DeviceMesh, tuple[Placement, ...]] | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        layout = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        by_layout.setdefault(layout, []).append(parameter)
    found: dict[ShardGroups, list[nn.Parameter]] = {}
    for layout, members in by_layout.items():
        found.setdefault(_shard_groups(*layout) if layout else (), []).extend(members)
    return found


def _shard_groups(mesh: DeviceMesh, placements: Sequence[Placement]) -> ShardGroups:
    # `_StridedShard` is not a subclass of `Shard`; both have a `dim`, and `Replicate` has none.
    cut = [axis for axis, placement in enumerate(placements) if hasattr(placement, "dim") and mesh.size(axis) > 1]
    return tuple(mesh.get_group(axis) for axis in cut)


def _sum_of_squares(parameters: Sequence[nn.Parameter], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Σ g² of this rank's shards, as a 0-d tensor on `device`."""
    norms = [kept.norm.to(dtype) for kept in map(offloaded, parameters) if kept is not None]
    for same_device in _by_device([local(p.grad) for p in parameters if p.grad is not None]).values():
        norms += torch._foreach_norm(same_device, 2.0, dtype=dtype)
    total = torch.zeros((), dtype=dtype, device=device)
    for same_device in _by_device(norms).values():
        total += copied_to(torch.stack(same_device).square().sum(), device)
    return total


def _by_device(tensors: Iterable[torch.Tensor]) -> dict[torch.device, list[torch.Tensor]]:
    found: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return found


def _mesh_device(parameter: nn.Parameter) -> torch.device:
    """Where collectives of a parameter's mesh run: the accelerator, even when its shards are kept on the host."""
    if isinstance(parameter, DTensor):
        return torch.empty(0, device=parameter.device_mesh.device_type).device
    return parameter.device
