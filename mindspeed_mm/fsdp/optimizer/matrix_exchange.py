"""Whole matrices out of shards: ranks that share matrices take turns, so that each is worked on by one of them.

M matrices, R rows or columns of a shard along the dimension that is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mindspeed_mm.fsdp.ops.all_to_all import exchange_parts
from mindspeed_mm.fsdp.utils.model_parts import attribute_at


class Cut(NamedTuple):
    """How the last two dimensions of a parameter are cut over ranks. Cuts of the first of three (experts) and copies
    are no matter here: what a rank has of them is whole."""

    group: dist.ProcessGroup | None = None
    """Ranks that share the matrices; None: they are whole."""
    dim: int = 0
    """-2 or -1."""
    length: int = 0
    """Length of the whole matrix along `dim`."""
    ranks: int = 1
    rank: int = 0
    is_mixed: bool = False
    """Cut in several ways at a time."""
    device: torch.device | None = None
    """Where the ranks meet; None: where the shards are."""

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Equal for parameters that can be worked on together."""
        return self[:-1]

    def sizes(self) -> list[int]:
        """R of each rank, as `torch.chunk` cuts."""
        most = -(-self.length // self.ranks)
        return [max(0, min(most, self.length - rank * most)) for rank in range(self.ranks)]


def cut_of(parameter: torch.Tensor) -> Cut:
    """How a parameter's matrices are cut."""
    if not isinstance(parameter, DTensor):
        return Cut()
    mesh, first = parameter.device_mesh, parameter.ndim - 2
    cut = []
    for axis, placement in enumerate(parameter.placements):
        # `_StridedShard` is not a subclass of `Shard`; both have a `dim`, and `Replicate` has none.
        dim: int = attribute_at(placement, "dim", -1)
        if dim >= first and mesh.size(axis) > 1:
            cut.append((axis, dim, placement.is_shard()))
    if not cut:
        return Cut()
    axis, dim, is_plain = cut[0]
    if len(cut) > 1 or not is_plain:
        return Cut(is_mixed=True)
    return Cut(
        mesh.get_group(axis),
        dim - parameter.ndim,
        parameter.shape[dim],
        mesh.size(axis),
        mesh.get_local_rank(axis),
        device=mesh_device(parameter),
    )


def mesh_device(parameter: DTensor | torch.Tensor) -> torch.device:
    """Where collectives run: the accelerator, even when shards are kept on the host."""
    if isinstance(parameter, DTensor):
        return torch.empty(0, device=parameter.device_mesh.device_type).device
    return parameter.device


def shared_work(
    shards: torch.Tensor, cut: Cut, work: Callable[[torch.Tensor], torch.Tensor], at_a_time_bytes: int
) -> torch.Tensor:
    """What `work` makes of whole matrices, cut as they were.

    Args:
        shards: (…, rows, columns), this rank's parts of M matrices.
        cut: How they are cut.
        work: (M', rows, columns) → the same shape.
        at_a_time_bytes: Whole matrices on a rank at a time, at least one.
    """
    flat = shards.flatten(end_dim=-3)
    if not len(flat):  # fewer experts than ranks
        return shards
    other = flat.shape[-1 if cut.dim == -2 else -2]
    whole_bytes = (cut.length or flat.shape[-1]) * other * flat.element_size()  # the same on all ranks
    most = max(1, at_a_time_bytes // whole_bytes) * cut.ranks
    results = [_worked_on(some, cut, work) for some in flat.split(most)]
    return torch.cat(results).view_as(shards)


def _worked_on(shards: torch.Tensor, cut: Cut, work: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    if cut.group is None:
        return work(shards)
    shares = [len(part) for part in torch.arange(len(shards)).tensor_split(cut.ranks)]
    own, sizes = shares[cut.rank], cut.sizes()
    moved = shards.to(cut.device).transpose(cut.dim, -2)  # (M, R, other)
    other = moved.shape[-1]
    # There: this rank's rows of everybody's matrices, for all rows of its own. Back: the same the other way round.
    there = [(matrices, sizes[cut.rank], other) for matrices in shares]
    back = [(own, rows, other) for rows in sizes]
    whole = torch.cat(exchange_parts(moved.split(shares), back, cut.group), dim=1).transpose(cut.dim, -2)
    if own:
        whole = work(whole)
    returned = exchange_parts(whole.transpose(cut.dim, -2).split(sizes, dim=1), there, cut.group)
    return torch.cat(returned).transpose(cut.dim, -2)
