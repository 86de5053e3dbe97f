"""What sharding (torch's `fully_shard`) holds for a while: gathered parameters and buffers of reductions.

The simulated model is whole; each sharded unit adds, at the moments when `fully_shard` does, what it would take: the
gathered copy of its parameters, the flat buffer that they arrive in, the flat buffer that gradients leave in, and this
rank's part of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from typing_extensions import override

from mindspeed_mm.fsdp.tools.memory_model.ledger import GATHERED, GRADIENTS, HOST, REDUCTION, BookedWork, Label
from mindspeed_mm.fsdp.tools.memory_model.simulation import Simulation, pattern_of


@dataclass(frozen=True)
class ShardedUnit:
    """Modules that are gathered together, in the simulated model. Sizes are of one rank, with padding."""

    names: tuple[str, ...]
    """Of the modules; empty text: the root."""
    parameters: tuple[nn.Parameter, ...]
    """The fake ones of these modules that no inner unit has."""
    whole_bytes: int
    """Of all parameters as they are gathered, padded to the number of shards."""
    trained_numel: int
    """Of the trained ones, padded."""
    shards: int
    compute: torch.dtype
    """What parameters are gathered in."""
    reduce: torch.dtype
    """What gradients are summed in."""
    master: torch.dtype
    """What the gradients of the shards are kept in."""
    frees_after_forward: bool = True
    on_host: bool = False
    """Shards and their gradients lie on the host."""


class Gathering:
    """Adds all units of a model to a simulation.

    Args:
        simulation: Under way.
        units: Children before parents.
    """

    def __init__(self, simulation: Simulation, units: Sequence[ShardedUnit]) -> None:
        self.simulation, self.units, self.ledger = simulation, units, simulation.ledger
        self.reduces = True
        """Whether the next backward pass communicates gradients."""
        self.block_of: Callable[[str], str] = lambda module: ""
        """Name of a module → the block that it is, or is inside of, where the books say so."""
        self._running = [_RunningUnit(self, unit) for unit in units]
        self._order: list[_RunningUnit] = []  # of the forward pass
        self._arrived: int | None = None
        self._ahead: tuple[_RunningUnit, int] | None = None
        self._departed: int | None = None
        self._finished = 0

    def attach(self, model: nn.Module) -> None:
        """Hang the units' hooks on the simulated model."""
        for running in self._running:
            running.attach(model)
        model.register_forward_hook(lambda *_: self.forward_ended())

    def finish(self) -> None:
        """A backward pass has ended: what is still gathered is reduced and freed."""
        for running in self._running:
            name = running.name
            block = self.block_of(name)
            self.ledger.enter(BookedWork(f"end of {name.removeprefix(block)}", self._finished, block))
            running.after_backward()
        self.ledger.enter(BookedWork("", self._finished, ""))
        self._finished += 1
        self._departed_is(None)
        self._order.clear()
        self._ahead = None

    def forward_ended(self) -> None:
        """The last unit has arrived."""
        self._arrived_is(None)

    def gathered_in_forward(self, running: _RunningUnit) -> None:
        """A unit's parameters arrive in a flat buffer and are copied out of it. It stays until the next one has come:
        communication runs ahead of the computation."""
        self._order.append(running)
        buffer = self._buffer(running)
        self._arrived_is(None)
        running.take()
        self._arrived_is(buffer)

    def gathered_in_backward(self, running: _RunningUnit) -> None:
        """As above; here the buffer of the unit that comes next stays while this one computes."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is running:
            buffer = ahead[1]
        else:
            buffer = self._buffer(running)
        running.take()
        self.ledger.give_back(buffer)
        if ahead is not None and ahead[1] != buffer:
            self.ledger.give_back(ahead[1])
        before: list[_RunningUnit] = []
        if running in self._order:
            before = self._order[: self._order.index(running)]
        if before and not before[-1].is_gathered:
            self._ahead = (before[-1], self._buffer(before[-1]))

    def depart(self, unit: ShardedUnit) -> None:
        """The flat buffer that gradients leave in; it stays until the next unit's."""
        self._departed_is(None)
        self._departed_is(self.ledger.take(Label(REDUCTION), unit.trained_numel * unit.reduce.itemsize))

    def _buffer(self, running: _RunningUnit) -> int:
        return self.ledger.take(Label(GATHERED, "buffers"), running.size)

    def _arrived_is(self, entry: int | None) -> None:
        if self._arrived is not None:
            self.ledger.give_back(self._arrived)
        self._arrived = entry

    def _departed_is(self, entry: int | None) -> None:
        if self._departed is not None:
            self.ledger.give_back(self._departed)
        self._departed = entry


class _RunningUnit:
    """One unit in a simulated step."""

    def __init__(self, gathering: Gathering, unit: ShardedUnit) -> None:
        self._all, self._unit = gathering, unit
        self._ledger = gathering.ledger
        self._module = pattern_of(unit.names[0]) or "the rest"
        self._trained = [parameter for parameter in unit.parameters if parameter.requires_grad]
        self._gathered: int | None = None
        self._kept: list[int] = []  # whole gradients of micro-batches before
        self._has_gradients = self._is_backward = False
        self._missing = 0

    @property
    def name(self) -> str:
        """Name of the first module that it gathers."""
        return self._unit.names[0]

    @property
    def size(self) -> int:
        """Bytes of the gathered parameters."""
        return self._unit.whole_bytes

    @property
    def is_gathered(self) -> bool:
        """Whether they are held now."""
        return self._gathered is not None

    def take(self) -> None:
        """Enter the gathered parameters in the ledger; `is_gathered` is true from then on."""
        self._gathered = self._ledger.take(Label(GATHERED, self._module), self.size)

    def attach(self, model: nn.Module) -> None:
        for name in self._unit.names:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after_forward)
        for parameter in self._trained:
            self._all.simulation.on_gradient(parameter, self._accumulated)

    def _gather(self, *, in_forward: bool) -> None:
        if self.is_gathered:
            return
        if self._unit.shards == 1:
            self.take()
        elif in_forward:
            self._all.gathered_in_forward(self)
        else:
            self._all.gathered_in_backward(self)

    def _free(self) -> None:
        if self._gathered is not None:
            self._ledger.give_back(self._gathered)
            self._gathered = None

    def _before_forward(
        self, _module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        self._gather(in_forward=True)
        leaves, structure = tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if _has_gradient(leaf)]
        if not places or not torch.is_grad_enabled():
            return None
        # Aliases of this unit alone: the gradient of a tensor that all blocks read is whole only when all are through.
        aliases = _EndOfBackward.apply(self.inputs_have_gradients, *[leaves[place] for place in places])
        for place, alias in zip(places, aliases, strict=True):
            leaves[place] = alias
        given: tuple[tuple[object, ...], dict[str, object]] = tree_unflatten(leaves, structure)
        return given

    def inputs_have_gradients(self) -> None:
        """The backward pass is through, also where a parameter was not used, and where none is trained."""
        if self._is_backward or not self._trained:
            self.after_backward()

    def _after_forward(self, _module: nn.Module, _args: object, outputs: object) -> None:
        if self._unit.frees_after_forward:
            self._free()
        for tensor in _tensors_with_gradients(outputs):
            tensor.register_hook(self._before_backward)

    def _before_backward(self, _: torch.Tensor) -> None:
        if not self._is_backward:
            self._is_backward, self._missing = True, len(self._trained)
            self._gather(in_forward=False)

    def _accumulated(self, _: nn.Parameter) -> None:
        self._missing -= 1
        if self._is_backward and self._missing == 0:
            self.after_backward()

    def after_backward(self) -> None:
        """Gradients of all parameters are there, or will not come."""
        self._is_backward = False
        found = [parameter for parameter in self._trained if parameter.grad is not None]
        # Between micro-batches, what stays whole after the forward pass is not cut after the backward pass.
        if self._all.reduces or self._unit.frees_after_forward:
            self._free()
        if not found and not (self._kept and self._all.reduces):
            return
        unit = self._unit
        if self._all.reduces:
            self._all.depart(unit)
            self._forget(found)
            if unit.shards == 1:  # torch copies what it divides: the copy and the sum stand beside the buffer
                copies = 2 * unit.trained_numel * unit.reduce.itemsize
                self._ledger.give_back(self._ledger.take(Label(REDUCTION), copies))
            if not self._has_gradients:
                category = HOST if unit.on_host else GRADIENTS
                size = unit.trained_numel // unit.shards * unit.master.itemsize
                self._ledger.take(Label(category, self._module), size)
                self._has_gradients = True
        # `fully_shard` adds whole gradients of micro-batches up in the type of the reduction.
        elif unit.reduce != unit.compute:
            if not self._kept:
                label = Label(GRADIENTS, self._module)
                self._kept = [self._ledger.take(label, unit.trained_numel * unit.reduce.itemsize)]
            for parameter in found:
                parameter.grad = None

    def _forget(self, found: Sequence[nn.Parameter]) -> None:
        for entry in self._kept:
            self._ledger.give_back(entry)
        self._kept = []
        for parameter in found:
            parameter.grad = None


class _EndOfBackward(torch.autograd.Function):
    """Passes tensors through, and says when the gradients of all of them are there, as FSDP2's
    `RegisterPostBackwardFunction` does. It keeps none of them."""

    @staticmethod
    @override
    def forward(ctx: FunctionCtx, notify: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.notify = notify  # type: ignore[attr-defined]
        return tensors

    @staticmethod
    @override
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.notify()  # type: ignore[attr-defined]
        return (None, *gradients)


def _has_gradient(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _tensors_with_gradients(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if _has_gradient(leaf)]
