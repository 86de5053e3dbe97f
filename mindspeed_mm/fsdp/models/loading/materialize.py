"""Gives memory to parameters on the meta device, sharded or not, and moves buffers; values come afterwards."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn

from mindspeed_mm.fsdp.models.structure.host_weights import host_weights
from mindspeed_mm.fsdp.models.structure.share import bind_stages, holders_of
from mindspeed_mm.fsdp.models.structure.ties import shared_parameters, tie


def materialize(model: nn.Module, device: torch.device, buffer_device: torch.device | None = None) -> None:
    """Put parameters (uninitialised where they were on meta) and buffers on their devices.

    Args:
        model: The model, after `fully_shard`: each rank then reserves memory for its shards only.
        device: Of the parameters.
        buffer_device: Of the buffers; `device` when None. They differ when parameters are offloaded to the host.
    """
    ties = shared_parameters(model)
    on_host = host_weights(model)
    waiting = {id(parameter) for name, parameter in model.named_parameters() if name in on_host}
    buffers = set(map(id, chain.from_iterable(holder.buffers() for holder in holders_of(model))))

    def place(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in buffers:
            return tensor.to(buffer_device or device)
        where = torch.device("cpu") if id(tensor) in waiting else device
        if tensor.is_meta:
            return torch.empty_like(tensor, device=where)
        return tensor.to(where)

    for holder in holders_of(model):
        holder._apply(place)  # and not `to_empty`, which would lose the buffers' values
    bind_stages(model)
    tie(model, ties)
