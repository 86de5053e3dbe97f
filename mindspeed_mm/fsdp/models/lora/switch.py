"""The trained adapter switched off for a while: what is left is the model that training started from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from mindspeed_mm.fsdp.models.lora.names import ADAPTER

if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTunerLayer


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes without the adapter that is trained; those that lie frozen under it stay on. Nothing
    is learnt from what is computed inside: call it without gradients.

    Args:
        model: With adapters, sharded or not. Parameters keep their values and stay trainable.
    """
    layers = _adapted(model)
    before = [layer._active_adapter for layer in layers]
    try:
        for layer in layers:
            layer._active_adapter = [name for name in layer.active_adapters if name != ADAPTER]
        yield
    finally:
        for layer, active in zip(layers, before, strict=True):
            layer._active_adapter = active


def _adapted(model: nn.Module) -> list[BaseTunerLayer]:
    from peft.tuners.tuners_utils import BaseTunerLayer  # half a second to import

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
