"""Builds a model without weights: parameters on the meta device, buffers real.

Buffers hold what a constructor computes (rotary frequencies, position ids); on the meta device they would be lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, every parameter that a module registers goes to the meta device at once; ties between modules hold.

    `torch.empty` in a constructor reserves addresses, not memory, so even a layer larger than memory can be built.
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
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
