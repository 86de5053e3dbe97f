"""Moves what modules save for the backward pass to the host, and brings it back one module ahead of its use.

What autograd would keep alive are *storages*: each goes to the host once, whatever views of it are saved, and comes
back with the same strides. A module's storages leave while the next module computes, and are let go of on the device
when that one is done. In the backward pass, the first tensor that a module wants starts the copies for the module
before it. What the last module before a backward pass saves is wanted at once: which one that is shows in the first
pass, and from then on its storages stay. With recomputation, what a module saves is its input. Parameters, buffers and
small tensors stay.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from mindspeed_mm.fsdp.ops.forward_stack import Forward, ForwardKind, replace_forward
from mindspeed_mm.fsdp.utils.device import get_device_type
from mindspeed_mm.fsdp.utils.host_copies import HostCopies

SMALLEST_BYTES = 16 * 1024
"""Smallest storage that is worth a copy."""


def offload_activations(model: nn.Module, names: Iterable[str]) -> None:
    """Keep on the host what these modules save; call it before sharding and after recomputation.

    Args:
        model: Parameters on meta or real.
        names: Modules, none inside another.
    """
    traffic = ActivationTraffic()
    for name in names:
        module = model.get_submodule(name)
        replace_forward(module, ForwardKind.OFFLOAD, OffloadedForward(module, traffic))


class OffloadedForward:
    """A module's `forward` whose saved tensors travel. Not in passes without gradients.

    Args:
        module: Nothing of its own parameters is moved.
        traffic: What all modules of a model share.
    """

    def __init__(self, module: nn.Module, traffic: ActivationTraffic) -> None:
        self._forward: Forward = module.forward
        self._module = module
        self._traffic = traffic

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Outputs of the module, the very same."""
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        call = self._traffic.open(self._module)
        with saved_tensors_hooks(lambda tensor: self._traffic.pack(call, tensor), self._traffic.unpack):
            outputs = self._forward(*args, **kwargs)
        self._traffic.close(call)
        return outputs


class MovedStorage:
    """One storage on its way.

    Args:
        home: The storage on the device, in bytes; let go of once the copy is done.
        on_host: The copy.
    """

    def __init__(self, home: torch.Tensor, on_host: torch.Tensor) -> None:
        self.home: torch.Tensor | None = home
        self.on_host = on_host
        self.device = home.device


class ModuleCall:
    """One call of one module: what it saved.

    Args:
        module: Which one.
        before: The call before it, whose storages are wanted next in the backward pass.
    """

    def __init__(self, module: nn.Module, before: ModuleCall | None) -> None:
        self.moved_storages: weakref.WeakKeyDictionary[MovedStorage, None] = weakref.WeakKeyDictionary()
        """In the order in which they were saved; each once, however many saved tensors are views of it."""
        self.sent: torch.Event | None = None
        self.module = module
        self._before = weakref.ref(before) if before is not None else None
        self._seen: set[int] = set()
        self._own: set[int] = set()

    @property
    def before(self) -> ModuleCall | None:
        """None when nothing of it is wanted any more."""
        if self._before is not None:
            return self._before()
        return None

    def is_own(self, tensor: torch.Tensor) -> bool:
        """Whether it is a parameter or buffer, or a view of one. Modules that are sharded inside this one have other
        parameters while they run."""
        for own in (*self.module.parameters(), *self.module.buffers()):
            if id(own) not in self._seen:
                self._seen.add(id(own))
                self._own.add(_storage_address(own))
        return _storage_address(tensor) in self._own


@dataclass(frozen=True)
class SavedView:
    """What autograd keeps instead of a tensor."""

    moved: MovedStorage
    call: ModuleCall
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class ActivationTraffic:
    """All storages of a model that are on their way or on the host."""

    def __init__(self) -> None:
        self._copies = HostCopies()
        self._known: dict[tuple[StorageWeakRef, int], weakref.ref[MovedStorage]] = {}
        """(storage, version) → where it is: a storage that several modules save, and that is kept, goes once."""
        self._coming: dict[MovedStorage, torch.Event | None] = {}
        """On their way back and not read yet: their memory must not be given to others before they arrived."""
        self._leaving: ModuleCall | None = None
        self._last: weakref.ref[ModuleCall] | None = None
        self._wanted_at_once: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Modules after which the backward pass began: nothing of theirs is worth a copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationTraffic:
        return memo.setdefault(id(self), ActivationTraffic())

    def open(self, module: nn.Module) -> ModuleCall:
        """Return a record of the call of a module that begins, linked to the call before it."""
        before = None
        if self._last is not None:
            before = self._last()
        call = ModuleCall(module, before)
        self._last = weakref.ref(call)
        self._drop_unread()
        return call

    def close(self, call: ModuleCall) -> None:
        """A module is done: what the one before it saved has had its time to leave."""
        call.sent = self._copies.mark()
        leaving, self._leaving = self._leaving, call
        if leaving is not None:
            self._let_go(leaving)
        self._forget_dead()

    def pack(self, call: ModuleCall, tensor: torch.Tensor) -> SavedView | torch.Tensor:
        """What autograd keeps: a `SavedView`, or the tensor where it stays."""
        moved = self._moved_storage(call, tensor)
        if moved is None:
            return tensor.detach()  # autograd must not keep what knows its own history: they would never be freed
        call.moved_storages[moved] = None
        return SavedView(moved, call, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())

    def unpack(self, saved: SavedView | torch.Tensor) -> torch.Tensor:
        """The tensor; starts the copies for the module that comes next in the backward pass."""
        if not isinstance(saved, SavedView):
            return saved
        if self._leaving is saved.call:
            self._keep_last(saved.call)
        self._bring_back(saved.call)
        before = saved.call.before
        if before is not None:
            self._bring_back(before)
        moved = saved.moved
        assert moved.home is not None
        self._copies.wait(self._coming.pop(moved, None))
        empty = torch.empty(0, dtype=saved.dtype, device=moved.device)
        return empty.set_(moved.home.untyped_storage(), saved.offset, saved.size, saved.stride)

    def _moved_storage(self, call: ModuleCall, tensor: torch.Tensor) -> MovedStorage | None:
        """Return the tensor's storage on its way to the host, started once; None for a tensor that stays."""
        if not _can_travel(tensor):
            return None
        storage = tensor.untyped_storage()
        key = (StorageWeakRef(storage), tensor._version)
        if key in self._known:
            known = self._known[key]()
            if known is not None:
                return known
        if call.module in self._wanted_at_once or call.is_own(tensor):
            return None
        home = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        moved = MovedStorage(home, self._copies.to_host(home))
        self._known[key] = weakref.ref(moved)
        return moved

    def _let_go(self, call: ModuleCall) -> None:
        self._copies.wait(call.sent)  # the memory is given to the computing stream again
        for moved in call.moved_storages:
            moved.home = None

    def _keep_last(self, call: ModuleCall) -> None:
        """The backward pass begins with what was saved last, which is still on the device."""
        self._leaving = None
        self._wanted_at_once.add(call.module)
        self._copies.wait(call.sent)  # this once they were copied: the memory is let go of as soon as it has been used

    def _bring_back(self, call: ModuleCall) -> None:
        missing = [moved for moved in call.moved_storages if moved.home is None]
        for moved in missing:
            moved.home = self._copies.to_device(moved.on_host, moved.device)
        if missing:
            self._coming |= dict.fromkeys(missing, self._copies.mark())

    def _drop_unread(self) -> None:
        for mark in self._coming.values():
            self._copies.wait(mark)
        self._coming.clear()

    def _forget_dead(self) -> None:
        self._known = {
            (storage, version): moved
            for (storage, version), moved in self._known.items()
            if moved() is not None and not storage.expired()
        }


def _can_travel(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.device.type == get_device_type()
        and tensor.layout == torch.strided
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.untyped_storage().nbytes() >= SMALLEST_BYTES
    )


def _storage_address(tensor: torch.Tensor) -> int:
    """Of its storage on this rank; 0 where it has none."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            tensor = tensor.to_local()
    if tensor.device.type == "meta":
        return 0
    return tensor.untyped_storage().data_ptr()
