"""Which part of a full tensor this rank holds, for plain tensors and for DTensors with any sharded placements, and
tensors cut as a parameter is.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from mindspeed_mm.checkpoint.lazy_tensor import Region, whole
from mindspeed_mm.fsdp.utils.device import get_device_type
from mindspeed_mm.fsdp.utils.model_parts import attribute_at


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """The plain tensor with this rank's part, for writing in place."""
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            return parameter.to_local()
        return parameter.data


def whole_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """All of it, detached; a collective when it is sharded. Cut along two axes it is gathered twice, and torch would
    say for each that this takes time."""
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return parameter.detach().full_tensor()
    finally:
        logger.setLevel(level)


def copy_whole(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Write this rank's part of the full tensor `values` into a parameter."""
    for piece, region in local_pieces(parameter):
        own = values
        for dim, (start, length) in enumerate(region):
            own = own.narrow(dim, start, length)
        piece.copy_(own)


def local_pieces(parameter: torch.Tensor) -> Iterator[tuple[torch.Tensor, Region]]:
    """Views of the local tensor, each with the region of the full tensor that it holds.

    One piece for ordinary sharding; an uneven combination of plans on one dim may give several.
    """
    local = local_tensor(parameter)
    if not isinstance(parameter, DTensor):
        yield local, whole(local.shape)
        return
    runs = [_runs(parameter, dim) for dim in range(parameter.ndim)]
    for chosen in itertools.product(*runs):
        piece = local
        for dim, (local_start, _, length) in enumerate(chosen):
            piece = piece.narrow(dim, local_start, length)
        yield piece, tuple((start, length) for _, start, length in chosen)


def _runs(parameter: DTensor, dim: int) -> list[tuple[int, int, int]]:
    """Stretches along `dim`: (start in the local tensor, start in the full one, length)."""
    positions = torch.arange(parameter.shape[dim])
    coordinate = parameter.device_mesh.get_coordinate()
    if coordinate is None:
        return []  # this rank is outside the mesh and holds nothing
    for mesh_axis, placement in enumerate(parameter.placements):
        positions = _shard(positions, dim, placement, parameter.device_mesh.size(mesh_axis), coordinate[mesh_axis])
    if positions.numel() == 0:
        return []
    borders = ((positions[1:] - positions[:-1]) != 1).nonzero().flatten() + 1
    starts = [0, *borders.tolist(), positions.numel()]
    return [(start, int(positions[start]), end - start) for start, end in itertools.pairwise(starts)]


def _shard(positions: torch.Tensor, dim: int, placement: Placement, parts: int, part: int) -> torch.Tensor:
    if placement.is_replicate() or attribute_at(placement, "dim") != dim:
        if placement.is_partial():
            raise ValueError(f"a parameter cannot be {placement}")
        return positions
    # A strided shard is cut a second time by a later mesh axis: each of `split_factor` stretches gives its own part.
    stretches = _chunk(positions, attribute_at(placement, "split_factor", 1))
    return torch.cat([_chunk(stretch, parts)[part] for stretch in stretches])


def _chunk(positions: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """`torch.chunk`, filled up with empty parts: what `fully_shard` and DTensor call an uneven shard."""
    found = list(positions.chunk(parts))
    return found + [positions[:0]] * (parts - len(found))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor with this rank's part."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def room_like(
    parameter: torch.Tensor, dtype: torch.dtype, device: torch.device, size: Sequence[int] | None = None
) -> torch.Tensor:
    """Zeros that are cut over the ranks as a parameter is.

    Args:
        parameter: Plain, or a DTensor.
        dtype: Of the zeros.
        device: Where they are; on the host of an accelerator they are pinned, so that they can be moved beside the
            computation.
        size: Global; as the parameter's in all but the last dimension. None: the parameter's.
    """
    size = torch.Size(size if size is not None else parameter.shape)
    own = list(local(parameter).shape)
    if size != parameter.shape:
        own[-1] = own[-1] * size[-1] // parameter.shape[-1]
    pinned = device.type == "cpu" and get_device_type() != "cpu"
    zeros = torch.zeros(own, dtype=dtype, device=device, pin_memory=pinned)
    if not isinstance(parameter, DTensor):
        return zeros
    # Not `from_local`, which would move the tensor to the device of the mesh.
    meta = TensorMeta(size, torch.empty(size, device="meta").stride(), dtype)
    spec = DTensorSpec(parameter.device_mesh, tuple(parameter.placements), tensor_meta=meta)
    return DTensor(zeros, spec, requires_grad=False)  # type: ignore[call-arg]
