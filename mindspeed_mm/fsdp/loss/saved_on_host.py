"""What a computation saves for the backward pass, kept on the host until then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from mindspeed_mm.fsdp.utils.host_copies import HostCopies


class _Saved(NamedTuple):
    on_host: torch.Tensor
    device: torch.device


class SavedOnHost:
    """A place on the host. Copies run beside the computation; on a CPU they are done when they return."""

    def __init__(self) -> None:
        self._copies = HostCopies()
        self._leaving: list[torch.Tensor] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """What is computed inside saves its tensors there."""
        if not torch.is_grad_enabled():
            yield
            return
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._copies.wait(self._copies.mark())
        self._leaving.clear()  # their memory is given to what is computed after the copies

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        source = tensor.detach().contiguous()
        self._leaving.append(source)
        return _Saved(self._copies.to_host(source), tensor.device)

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        tensor = self._copies.to_device(saved.on_host, saved.device)
        self._copies.wait(self._copies.mark())
        return tensor
