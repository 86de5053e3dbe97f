"""Room for optimizer state that a checkpoint holds: cut as the parameter is, and where the optimizer keeps it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mindspeed_mm.fsdp.optimizer.adamw import StreamedAdamW
from mindspeed_mm.fsdp.optimizer.shards import local, room_like


def state_room(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str, size: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Room for one entry of a parameter's state.

    Args:
        optimizer: Has the parameter.
        parameter: Sharded or not.
        key: Of the entry.
        size: Of the whole entry. What differs from the parameter's in more than the last dimension is whole on every
            rank.
        dtype: As it was stored.
    """
    device = _device(optimizer, parameter, key)
    if size and len(size) == parameter.ndim and tuple(size[:-1]) == tuple(parameter.shape[:-1]):
        return room_like(parameter, dtype, device, size)
    return torch.empty(tuple(size), dtype=dtype, device=device)


def _device(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str) -> torch.device:
    if isinstance(optimizer, StreamedAdamW):
        return optimizer.state_device(key, parameter)
    is_on_device = key != "step" or optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    return local(parameter).device if is_on_device else torch.device("cpu")
