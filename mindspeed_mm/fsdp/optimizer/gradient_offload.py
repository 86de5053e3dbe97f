"""Gradients that leave the device as soon as they are whole, and are added up on the host over the micro-batches.

`p.grad` is then None: a tensor's gradient must lie beside it. What it would be is read with `offloaded(p)`. Norms are
taken on the device before a gradient leaves it, and the clip factor is multiplied in when it is used: nothing waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from mindspeed_mm.fsdp.optimizer.shards import local, room_like

_NAME = "_mm_offloaded"


@dataclass
class OffloadedGradient:
    """The gradient of one parameter."""

    host: torch.Tensor
    """As the parameter is cut; its memory is kept from step to step."""
    norm: torch.Tensor
    """2-norm of this rank's part, on the device."""
    factor: torch.Tensor | None = None
    """What it is yet to be multiplied by."""
    is_held: bool = True
    """Whether there is a gradient."""

    def on_device(self, parameter: torch.Tensor) -> torch.Tensor:
        """A copy beside the parameter, this rank's part, multiplied."""
        gradient = local(self.host).to(local(parameter).device, non_blocking=True, copy=True)
        if self.factor is not None:
            gradient.mul_(self.factor)
        return gradient


def offload_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """From now on let gradients leave the device; `set_gradient_sync` must let every micro-batch communicate."""
    for parameter in parameters:
        if parameter.requires_grad:
            # FSDP2 calls it when the gradient is summed over ranks, on the queue that summed it.
            parameter.register_post_accumulate_grad_hook(_leave)


def offloaded(parameter: torch.Tensor) -> OffloadedGradient | None:
    """The gradient that has left the device; None where there is none."""
    kept: OffloadedGradient | None = vars(parameter).get(_NAME)
    if kept is None or not kept.is_held:
        return None
    return kept


def own_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient that there is, on the device, wherever it is kept; to be read, not written."""
    kept = offloaded(parameter)
    if kept is not None:
        return kept.on_device(parameter)
    assert parameter.grad is not None
    return local(parameter.grad)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient, cut as its parameter is, wherever it is kept; None where there is none. To be read, not written."""
    if offloaded(parameter) is None:
        return parameter.grad
    own = own_gradient(parameter)
    whole = room_like(parameter, own.dtype, own.device)
    local(whole).copy_(own)
    return whole


def forget_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Drop the gradients on the host, as `zero_grad` does on the device; their memory is kept."""
    for parameter in parameters:
        kept = offloaded(parameter)
        if kept is not None:
            kept.is_held, kept.factor = False, None


@torch.no_grad()
def _leave(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    gradient, kept = local(parameter.grad), vars(parameter).get(_NAME)
    if kept is None:
        host = room_like(parameter, gradient.dtype, torch.device("cpu"))
        kept = OffloadedGradient(host, norm=gradient.new_zeros(()), is_held=False)
        setattr(parameter, _NAME, kept)
    if kept.is_held:  # added where the computation is: adding on the host would have to wait for the copy
        gradient.add_(local(kept.host).to(gradient.device, non_blocking=True))
    local(kept.host).copy_(gradient, non_blocking=True)
    dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    (kept.norm,) = torch._foreach_norm([gradient], 2.0, dtype=dtype)
    kept.is_held, kept.factor, parameter.grad = True, None, None
