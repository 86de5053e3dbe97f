"""Counts where a host would wait for an accelerator, on a CPU: every reading of a number that was computed from the
model's parameters or from a batch after it was moved.

Tensors are followed by their memory: parameters and moved batches are of the device, and so is what is computed from
them. Reading one (`item`, `bool`, `tolist`, `cpu`) or asking for a size that depends on its values (`nonzero`, indexing
by a mask) is a wait.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.ops.host_values import carry_facts, carry_host_values
from mindspeed_mm.fsdp.train import train_engine

_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}
_ASKS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_dim", "_unique2", "bincount")
_TESTS = Path(__file__).parents[1]
_PROJECTS = ("mindspeed_mm", "transformers", "diffusers", "torch")


class _Device:
    """Memory that counts as the accelerator's."""

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}

    def add(self, tensor: torch.Tensor) -> None:
        if type(tensor) is torch.Tensor or isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            self._held[storage._cdata] = storage  # held, so that no address is used twice

    def has(self, value: Any) -> bool:
        if isinstance(value, DTensor):
            return True
        return isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in self._held


class _Follow(TorchDispatchMode):
    def __init__(self, device: _Device, found: Counter[str]) -> None:
        super().__init__()
        self._device, self._found = device, found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_of_device = any(self._device.has(leaf) for leaf in tree_leaves((args, kwargs)))
        name = func.overloadpacket.__name__
        if is_of_device and (name in _ASKS or _is_by_mask(name, args)):
            self._found[_place()] += 1
        outputs = func(*args, **(kwargs or {}))
        if is_of_device:
            written = (args, kwargs) if func._schema.is_mutable else ()
            for leaf in tree_leaves((outputs, written)):
                if isinstance(leaf, torch.Tensor):
                    self._device.add(leaf)
        return outputs


def _is_by_mask(name: str, args: tuple[Any, ...]) -> bool:
    if name == "repeat_interleave":
        return False  # counted where its size is not told: it then reads `_local_scalar_dense`
    is_index = name in ("index", "index_put", "index_put_")
    return is_index and any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in args[1])


class _Reads(TorchFunctionMode):
    def __init__(self, device: _Device, found: Counter[str]) -> None:
        super().__init__()
        self._device, self._found = device, found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and self._device.has(args[0]):
            self._found[_place()] += 1
        return func(*args, **(kwargs or {}))


def _place() -> str:
    """`project/file:function` of the innermost frame of ours, of transformers or of diffusers; else of torch."""
    places = []
    for frame in reversed(traceback.extract_stack()[:-2]):
        path = Path(frame.filename)
        project = next((each for each in _PROJECTS if each in path.parts), None)
        if project is not None and not path.is_relative_to(_TESTS):
            places.append((project, f"{Path(frame.filename).stem}:{frame.name}"))
    return next((place for project, place in places if project != "torch"), places[0][1] if places else "?")


@contextmanager
def counted(model: nn.Module) -> Iterator[Counter[str]]:
    """While inside, steps of a trainer are watched: place → waits."""
    device, found = _Device(), Counter[str]()
    for tensor in [*model.parameters(), *model.buffers()]:
        device.add(tensor.to_local() if isinstance(tensor, DTensor) else tensor)

    def move(batch: Batch, _device: torch.device) -> Batch:
        moved = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        for value in moved.values():
            if isinstance(value, torch.Tensor):
                device.add(value)
        carry_facts(batch, moved)
        carry_host_values(batch, moved)
        return moved

    with mock.patch.object(train_engine, "move", move), _Follow(device, found), _Reads(device, found):
        yield found
