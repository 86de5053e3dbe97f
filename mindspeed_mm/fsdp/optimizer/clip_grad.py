"""Gradient norm and clipping for parameters on any mix of meshes: sharded, replicated, plain.

Nothing here waits for the device: the norm is a tensor that the engine reads together with the loss. A bound may follow
the norms: their moving average, and three standard deviations more (Open-Sora Plan 1.5's adaptive gradient clipping,
MindSpeed-MM `patchs/adaptive_clip_grad_patch.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from mindspeed_mm.fsdp.models.loading.local_shard import local
from mindspeed_mm.fsdp.optimizer.offload import offloaded
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
    has_double = any(parameter.dtype == torch.float64 for parameter in parameters)
    dtype = torch.float64 if has_double else torch.float32
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
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for kept in filter(None, map(offloaded, parameters)):
        factor = scale.to(kept.norm.device)  # where the computation will be
        if kept.factor is not None:
            factor = kept.factor * factor
        kept.factor = factor
    for device, same_device in _gradients_by_device(parameters).items():
        factor = scale.to(device)
        if foreach is False:
            for gradient in same_device:
                gradient.mul_(factor)
        else:
            torch._foreach_mul_(same_device, factor)


@torch.no_grad()
def unscale_grads_(parameters: Iterable[nn.Parameter], divisor: float | torch.Tensor) -> None:
    """Divide gradients in place by what the loss was multiplied by, before their norm is taken. Overflown ones stay
    infinite or not a number, and so does their norm.

    Args:
        parameters: Those without a gradient are passed over.
        divisor: A number, or a plain 0-d tensor, which is not read.
    """
    parameters, factor = list(parameters), 1 / divisor
    for kept in filter(None, map(offloaded, parameters)):
        kept.factor = torch.ones_like(kept.norm).mul_(factor)
        kept.norm = kept.norm * kept.factor
    for device, same_device in _gradients_by_device(parameters).items():
        if isinstance(factor, torch.Tensor):
            factor = factor.to(device)
        torch._foreach_mul_(same_device, factor)


def _by_shard_groups(parameters: Sequence[nn.Parameter]) -> dict[ShardGroups, list[nn.Parameter]]:
    """Parameters by the process groups over which they are cut; none for plain and replicated ones."""
    groups_of: dict[tuple[DeviceMesh, tuple[Placement, ...]], ShardGroups] = {}
    found: dict[ShardGroups, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups: ShardGroups = ()
        if isinstance(parameter, DTensor):
            layout = (parameter.device_mesh, parameter.placements)
            if layout not in groups_of:  # a model has thousands of parameters and a handful of layouts
                groups_of[layout] = _shard_groups(*layout)
            groups = groups_of[layout]
        found.setdefault(groups, []).append(parameter)
    return found


def _shard_groups(mesh: DeviceMesh, placements: Sequence[Placement]) -> ShardGroups:
    groups = []
    for axis, placement in enumerate(placements):
        if not placement.is_replicate() and mesh.size(axis) > 1:
            groups.append(mesh.get_group(axis))
    return tuple(groups)


def _sum_of_squares(parameters: Sequence[nn.Parameter], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Σ g² of this rank's shards, as a 0-d tensor on `device`."""
    norms = [kept.norm.to(dtype) for kept in filter(None, map(offloaded, parameters))]
    for same_device in _gradients_by_device(parameters).values():
        norms += torch._foreach_norm(same_device, 2.0, dtype=dtype)
    total = torch.zeros((), dtype=dtype, device=device)
    for same_device in _by_device(norms).values():
        total += copied_to(torch.stack(same_device).square().sum(), device)
    return total


def _gradients_by_device(parameters: Iterable[nn.Parameter]) -> dict[torch.device, list[torch.Tensor]]:
    """This rank's part of each gradient there is."""
    return _by_device(local(parameter.grad) for parameter in parameters if parameter.grad is not None)


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


_DEVIATIONS = 3.0
_FIRST_FACTOR, _FIRST_MOST = 3.0, 1.0
"""The average begins with this many times the first norm, at most so much."""


@dataclass
class NormAverage:
    """Mean and variance of the norms of steps that were not clipped.

    Args:
        decay: Share of mean and variance that is kept at each step.
    """

    decay: float
    mean: float | None = None
    """None before the first step."""
    variance: float = 0.0

    def bound(self, fixed: float) -> float:
        """The largest norm of a step: mean + 3 √variance; before the first step `fixed`."""
        if self.mean is None:
            return fixed
        return self.mean + _DEVIATIONS * math.sqrt(self.variance)

    def after_step(self, norm: float) -> None:
        """Take in the norm of a step that was applied, before clipping. One above the bound changes nothing."""
        if self.mean is None:
            self.mean = min(_FIRST_FACTOR * norm, _FIRST_MOST)
        elif norm <= self.bound(norm):
            self.mean = self.decay * self.mean + (1 - self.decay) * norm
            self.variance = self.decay * self.variance + (1 - self.decay) * (self.mean - norm) ** 2

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps; empty before the first step."""
        if self.mean is None:
            return {}
        return {"mean": self.mean, "variance": self.variance}

    def load_state(self, state: dict[str, float]) -> None:
        """Go on from what a checkpoint has kept."""
        if state:
            self.mean, self.variance = state["mean"], state["variance"]
