"""Plain tensors and sharded ones alike: this rank's part of a tensor, and tensors cut as a parameter is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from mindspeed_mm.fsdp.utils.device import get_device_type


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor with this rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
