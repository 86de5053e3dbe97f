"""Builds a model without weights: parameters on the meta device, buffers real.

Buffers hold what a constructor computes (rotary frequencies, position ids); on the meta device they would be lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from mindspeed_mm.fsdp.ops.forward_stack import Args, Kwargs

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
    return tuple(sizes[0]) if sizes and not isinstance(sizes[0], int) else sizes


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
