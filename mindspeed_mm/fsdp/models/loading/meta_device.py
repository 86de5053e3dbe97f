"""Models without weights: parameters on the meta device and buffers real, and memory for them once they are sharded.

Buffers hold what a constructor computes (rotary frequencies, position ids); on the meta device they would be lost.
Values of parameters come later. Those that wait on the host until their block runs are noted on the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.structure.stages import bind_stages, holders_of
from mindspeed_mm.fsdp.ops.forward_stack import Args, Kwargs
from mindspeed_mm.fsdp.utils.model_parts import shared_parameters, tie

_LARGE_NUMEL = 1 << 28
"""What is larger is no buffer."""


class _LargeOnMeta(TorchFunctionMode):
    """Makes no large tensor that has no values of its own yet."""

    def __torch_function__(self, function: Any, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.empty and math.prod(_flat(args)) > _LARGE_NUMEL:
            kwargs = kwargs | {"device": "meta"}
        return function(*args, **kwargs)


def _flat(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    """`torch.empty(2, 3)` and `torch.empty((2, 3))` mean the same."""
    if sizes and not isinstance(sizes[0], int):
        return tuple(sizes[0])
    return sizes


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, every parameter that a module registers goes to the meta device at once; ties between modules hold.

    Even a layer larger than memory can be built: large results of `torch.empty`, for which a host may refuse to reserve
    addresses, are there from the beginning.
    """
    register = nn.Module.register_parameter
    moved = WeakIdKeyDictionary()  # a parameter set on two modules stays one

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is None or parameter.is_meta:
            return
        if parameter not in moved:
            moved[parameter] = type(parameter)(parameter.data.to("meta"), requires_grad=parameter.requires_grad)
        module._parameters[name] = moved[parameter]

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        with _LargeOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


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


@dataclass(frozen=True)
class HostWeights:
    """The fact of a model."""

    names: frozenset[str]


def host_weights(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that are loaded into the memory of the host; none of most models."""
    found = facts_of(model).noted(HostWeights)
    if found is not None:
        return found.names
    return frozenset()
