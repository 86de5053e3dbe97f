"""Live memory of a training step, tensor by tensor, on any device: what was held at the peak, by module and category.

A dispatch mode sees every operator below autograd and follows the storages of its tensors from birth to death, so that
the figures are exact counts of bytes, not samples. What it cannot see is memory that an operator takes and gives back
inside (workspaces of kernels), and the gaps of an allocator.

    with MemoryTracker(model, optimizer, device) as tracker:
        ...  # one or more steps
    tracker.peak().by_category["activations"]
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from mindspeed_mm.fsdp.tools.module_walk import OUTSIDE, ModuleWalk

PARAMETERS = "parameters"
BUFFERS = "buffers"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
GATHERED = "gathered"
ACTIVATIONS = "activations"
RECOMPUTED = "recomputed"
INPUTS = "inputs"
TEMPORARY = "temporary"

CATEGORIES: dict[str, str] = {
    PARAMETERS: "weights as the rank keeps them (its shards)",
    BUFFERS: "buffers of the model",
    GRADIENTS: "gradients as the rank keeps them",
    OPTIMIZER: "the optimizer's states",
    GATHERED: "whole weights, gathered from shards while a module needs them",
    ACTIVATIONS: "what a forward pass leaves for the backward pass",
    RECOMPUTED: "what a forward pass repeated inside the backward pass makes",
    INPUTS: "batches, and whatever else was there before the forward pass began",
    TEMPORARY: "the rest: allocated and freed within one pass",
}
"""Category → what it holds."""

OPTIMIZER_STEP = "(optimizer step)"
"""Name of the place where the optimizer works."""
_ACCELERATOR_BLOCK_BYTES = 512
"""Accelerators' allocators hand out multiples of it."""


@dataclass(frozen=True)
class MemoryPeak:
    """What was held when most was held. Bytes."""

    total_bytes: int
    by_category: dict[str, int]
    """Category → bytes; the sum is the total."""
    by_module: dict[str, dict[str, int]]
    """Innermost module that made it (for weights, gradients and states: that owns the parameter) → category → bytes."""
    module: str
    """The module at work at that moment."""
    direction: str
    """`forward`, `backward` or `between` passes."""
    operator: str
    """The operator whose result was the last straw."""


@dataclass(eq=False, slots=True)
class _Held:
    """A storage of a certain size, from its birth to its death. What it was for may turn out after the peak."""

    size: int
    module: str
    born: int
    """Backward passes begun before it was made."""
    before_forward: bool
    """No module had run since the last backward pass."""
    made_again: bool
    """Made by a forward pass inside a backward pass."""
    category: str = ""
    outlived_forward: bool = False

    def kind(self, passes: int | None = None) -> str:
        """Its category; `passes`: backward passes begun by now, for one that still lives."""
        if self.category:
            return self.category
        if self.made_again:
            return RECOMPUTED
        if not self.outlived_forward and (passes is None or passes == self.born):
            return TEMPORARY
        if self.before_forward:
            return INPUTS
        return ACTIVATIONS


@dataclass
class _Moment:
    """The highest point so far."""

    total: int = 0
    held: list[_Held] = field(default_factory=list)
    module: str = OUTSIDE
    direction: str = "between"
    operator: str = ""


class MemoryTracker(TorchDispatchMode):
    """Follows the memory of one device while it is entered; may be entered once.

    Args:
        model: The assembled model.
        optimizer: Over its parameters; None: nothing is counted as its state.
        device: Whose tensors count.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self._model, self._optimizer = model, optimizer
        self._device_type = (device or torch.device("cpu")).type
        self._block = 1 if self._device_type == "cpu" else _ACCELERATOR_BLOCK_BYTES
        self._walk = ModuleWalk(model, self._read_allocator)
        self._highest_allocated: dict[tuple[str, str], int] = {}
        self._live: dict[int, _Held] = {}
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._optimizing = False
        self._closed = False
        self._moment = _Moment()
        self._is_rising = False
        """The moment now is the highest, and what is held has not been written down yet."""
        self._highest: dict[tuple[str, str], int] = {}
        self.current_bytes = 0

    # --- what is asked of it ------------------------------------------------------------------------------------------

    def peak(self) -> MemoryPeak:
        """What was held at the highest point."""
        self._write_down_peak()
        passes = self._walk.backward_passes
        modules: dict[str, Counter[str]] = {}
        for held in self._moment.held:
            if held.size:
                modules.setdefault(held.module, Counter())[held.kind(passes)] += held.size
        total: Counter[str] = sum(modules.values(), Counter())
        return MemoryPeak(
            total_bytes=self._moment.total,
            by_category={name: total[name] for name in CATEGORIES if total[name]},
            by_module={name: dict(kinds) for name, kinds in modules.items()},
            module=self._moment.module,
            direction=self._moment.direction,
            operator=self._moment.operator,
        )

    def module_peaks(self) -> dict[str, dict[str, int]]:
        """Module → `forward` / `backward` / `between` → most that was held in all while it, or one inside of it, was at
        work."""
        return with_parents(self._highest)

    def allocated_peaks(self) -> dict[str, dict[str, int]]:
        """As `module_peaks`, as the accelerator's allocator counts it; empty on a CPU, which has none."""
        return with_parents(self._highest_allocated)

    # --- what it follows ----------------------------------------------------------------------------------------------

    def __enter__(self) -> MemoryTracker:
        self._walk.__enter__()
        self._note_state()
        self._handles = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        self._real_resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resizing()  # FSDP2 frees gathered weights so; no operator tells of it
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._real_resize
        for handle in self._handles:
            handle.remove()
        self._note_state()
        self._write_down_peak()
        self._walk.__exit__()
        self._closed = True
        self._watches.clear()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a subclass goes first: what it does with plain tensors comes here afterwards
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, INPUTS, func, OUTSIDE)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, "", func)
        return result

    def _see(self, tensor: torch.Tensor, category: str, func: object = "", module: str | None = None) -> None:
        """Note a tensor's storages: new, known, or of another size than before."""
        if is_traceable_wrapper_subclass(tensor):
            for inner in plain_tensors(tensor):
                self._see(inner, category, func, module)
            return
        if tensor.device.type != self._device_type or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        held = self._live.get(storage._cdata)
        if held is None:
            self._watch(storage)
            self._hold(storage._cdata, storage.nbytes(), category, str(func), module)
        elif held.size != self._rounded(storage.nbytes()):
            self._resized(storage, held.category, str(func))

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        self._watches[key] = weakref.ref(storage, lambda _: self._gone(key))

    def _resized(self, storage: torch.UntypedStorage, category: str, operator: str) -> None:
        if storage._cdata in self._live:
            self._forget(storage._cdata)
        else:
            self._watch(storage)
        self._hold(storage._cdata, storage.nbytes(), category, operator)

    def _hold(self, key: int, size: int, category: str, operator: str, module: str | None = None) -> None:
        spot = self._spot()
        held = _Held(
            size=self._rounded(size),
            module=module or spot[0],
            born=self._walk.backward_passes,
            before_forward=not (self._walk.has_run or self._walk.in_backward),
            made_again=self._walk.in_backward and self._walk.in_forward,
            category=category,
        )
        self._live[key] = held
        self.current_bytes += held.size
        self._highest[spot] = max(self._highest.get(spot, 0), self.current_bytes)
        if self.current_bytes > self._moment.total:
            self._moment = _Moment(self.current_bytes, [], *spot, operator)
            self._is_rising = True

    def _forget(self, key: int) -> None:
        self._write_down_peak()
        held = self._live.pop(key)
        held.outlived_forward = self._walk.backward_passes > held.born
        self.current_bytes -= held.size

    def _gone(self, key: int) -> None:
        if not self._closed and key in self._live:
            self._forget(key)
            self._watches.pop(key, None)

    def _read_allocator(self) -> None:
        """Just before another module is at work: the highest of this one. The host asks, the device is not waited
        for."""
        if self._device_type != "cpu":
            spot = self._spot()
            peak = torch.accelerator.max_memory_allocated()
            self._highest_allocated[spot] = max(self._highest_allocated.get(spot, 0), peak)
            torch.accelerator.reset_peak_memory_stats()

    def _spot(self) -> tuple[str, str]:
        module = OPTIMIZER_STEP if self._optimizing else self._walk.module
        if self._walk.in_forward:
            return module, "forward"
        return module, "backward" if self._walk.in_backward else "between"

    def _write_down_peak(self) -> None:
        """Only before something goes: while memory rises, each new thing would make the last list useless."""
        if self._is_rising:
            self._moment.held = list(self._live.values())
            self._is_rising = False

    def _rounded(self, size: int) -> int:
        return -(-size // self._block) * self._block

    # --- what storages are for ----------------------------------------------------------------------------------------

    def _note_state(self) -> None:
        """Tell parameters, gradients and states from the rest; what is one of them was so at the peak as well."""
        for name, parameter in self._model.named_parameters():
            owner = name.rpartition(".")[0] or OUTSIDE
            self._mark(parameter, PARAMETERS, owner)
            if parameter.grad is not None:
                self._mark(parameter.grad, GRADIENTS, owner)
            if self._optimizer is not None:
                for state in tree_leaves(dict(self._optimizer.state.get(parameter, {}))):
                    self._mark(state, OPTIMIZER, owner)
        for name, buffer in self._model.named_buffers():
            self._mark(buffer, BUFFERS, name.rpartition(".")[0] or OUTSIDE)

    def _mark(self, value: object, category: str, module: str) -> None:
        if not isinstance(value, torch.Tensor):
            return
        self._see(value, category, module=module)
        for tensor in plain_tensors(value):
            if tensor.layout != torch.strided:
                continue
            held = self._live.get(tensor.untyped_storage()._cdata)
            if held is not None:
                held.category, held.module = category, module

    def _before_optimizer(self, *_: object) -> None:
        self._note_state()
        self._read_allocator()
        self._optimizing = True

    def _after_optimizer(self, *_: object) -> None:
        self._read_allocator()
        self._optimizing = False
        self._note_state()

    def _resizing(self) -> object:
        real = self._real_resize

        def resize_(storage: torch.UntypedStorage, size: int) -> object:
            result = real(storage, size)
            held = self._live.get(storage._cdata)
            if storage.device.type == self._device_type:
                category = GATHERED
                if held is not None:
                    if held.category in ("", INPUTS):
                        held.category = GATHERED
                    category = held.category
                self._resized(storage, category, "resize_")
            return result

        return resize_


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with storage that a tensor consists of: itself, or what is inside of a subclass such as DTensor."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):  # a DTensor also names its mesh there
                yield from plain_tensors(inner)
    else:
        yield tensor


def with_parents(highest: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    """Peaks of innermost modules, raised into the modules around them: module → direction → bytes."""
    peaks: dict[str, dict[str, int]] = {}
    for (name, direction), size in highest.items():
        outer = name
        while outer:
            of_module = peaks.setdefault(outer, {})
            of_module[direction] = max(of_module.get(direction, 0), size)
            # A name in brackets is not that of a module, and has no parents.
            outer = "" if name.startswith("(") else outer.rpartition(".")[0]
    return peaks
