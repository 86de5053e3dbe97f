"""Activations that travel to the host, in a simulation: what `features.memory.activation_offload` does, on books alone.

What a module saves leaves while the next one computes; in the backward pass it comes back together with what the
module before it saved. On a CPU the host's copies are memory of the same kind.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from mindspeed_mm.fsdp.features.memory.activation_offload import SMALLEST_BYTES
from mindspeed_mm.fsdp.ops.forward_stack import ForwardKind, replace_forward
from mindspeed_mm.fsdp.tools.memory_model.ledger import ACTIVATIONS, HOST, Label
from mindspeed_mm.fsdp.tools.memory_model.simulation import Simulation


class SimulatedOffload:
    """The traffic of one model.

    Args:
        simulation: Under way.
        is_same_memory: The host's memory is the device's.
    """

    def __init__(self, simulation: Simulation, *, is_same_memory: bool) -> None:
        self._simulation = simulation
        self._label = Label(ACTIVATIONS, "copies on the host") if is_same_memory else Label(HOST)
        self._known: weakref.WeakValueDictionary[int, _Parcel] = weakref.WeakValueDictionary()
        self._stops: list[list[weakref.ref[_Parcel]]] = []

    def attach(self, model: nn.Module, names: Iterable[str]) -> None:
        """Let what these modules save travel, but for the last one, with which the backward pass begins."""
        listed = list(names)
        for name in listed:
            module = model.get_submodule(name)
            forward = self._travelling(module.forward, stays=name == listed[-1])
            replace_forward(module, ForwardKind.SIMULATION, forward)

    def _travelling(self, forward: Callable[..., object], *, stays: bool) -> Callable[..., object]:
        def run(*args: object, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            number = len(self._stops)
            self._stops.append([])
            packed = saved_tensors_hooks(lambda tensor: self._pack(number, tensor), self._unpack)
            with nullcontext() if stays else packed:
                outputs = forward(*args, **kwargs)
            # What the module before saved has left while this one computed.
            for parcel in self._alive(number - 1):
                parcel.home = None
            return outputs

        return run

    def _pack(self, number: int, tensor: torch.Tensor) -> object:
        size, entry = tensor.untyped_storage().nbytes(), self._simulation.entry_of(tensor)
        if entry is None or size < SMALLEST_BYTES:
            return tensor.detach()
        parcel = self._known.get(entry)
        if parcel is None:
            parcel = _Parcel(_whole(tensor))
            copy = self._simulation.ledger.take(self._label, size)
            weakref.finalize(parcel, self._simulation.ledger.give_back, copy)
            self._known[entry] = parcel
        self._stops[number].append(weakref.ref(parcel))
        return _Ticket(parcel, number, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _unpack(self, ticket: object) -> torch.Tensor:
        if not isinstance(ticket, _Ticket):
            return ticket
        for number in (ticket.number, ticket.number - 1):
            for parcel in self._alive(number):
                if parcel.home is None:
                    parcel.home = self._simulation.empty(parcel.shape, parcel.dtype)
        assert ticket.parcel.home is not None
        whole = ticket.parcel.home.view(ticket.dtype)
        return whole.as_strided(ticket.size, ticket.stride, ticket.offset)

    def _alive(self, number: int) -> list[_Parcel]:
        stop = self._stops[number] if number >= 0 else []
        return list(filter(None, (ref() for ref in stop)))


class _Parcel:
    """One storage; `home` is None while it is on the host alone."""

    def __init__(self, home: torch.Tensor) -> None:
        self.home: torch.Tensor | None = home
        self.shape, self.dtype = home.shape, home.dtype


class _Ticket(NamedTuple):
    parcel: _Parcel
    number: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage, flat."""
    numel = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((numel,), (1,), 0)
