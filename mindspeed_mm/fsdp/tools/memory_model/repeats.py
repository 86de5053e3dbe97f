"""Simulates a few blocks of each kind: behind them, calls of blocks of the same kind hand on what they are given.

Whether a block may be left out is decided when it is called. Blocks that follow one another are of one kind, by periods
(`kinds`); the calls have the same arguments, or arguments that the block before returned; and as many periods as are
needed have run. What was left out is written into the books afterwards (`unrolling`), where it is checked once more.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from mindspeed_mm.fsdp.tools.memory_model.kinds import Alike, Counted, find_alike, kinds_of, simulated_periods
from mindspeed_mm.fsdp.tools.memory_model.ledger import BookedWork, MemoryLedger
from mindspeed_mm.fsdp.tools.memory_model.simulation import Simulation
from mindspeed_mm.fsdp.tools.memory_model.static_part import HeldUnit
from mindspeed_mm.fsdp.tools.memory_model.unrolling import NotAlike, SimulatedRun

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)
FORWARD, BACKWARD = "forward", "backward"


class _Shape(NamedTuple):
    """A tensor among arguments or results."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool
    kind: type

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Shape:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, type(tensor))


class _Leaf(NamedTuple):
    """One of the values that a call gets or returns. Tensors are not kept alive."""

    shape: _Shape | None
    tensor: weakref.ref[torch.Tensor] | None
    storage: weakref.ref[torch.UntypedStorage] | None
    linked: int
    """Which result of the block before it is; -1: none."""
    value: object
    """Of what is no tensor: the value, or a reference to it."""

    @classmethod
    def of(cls, leaf: object, results: Sequence[_Leaf] = ()) -> _Leaf:
        if isinstance(leaf, torch.Tensor):
            linked = -1
            for number, result in enumerate(results):
                if result.tensor is not None and result.tensor() is leaf:
                    linked = number
            storage = weakref.ref(leaf.untyped_storage())
            return cls(_Shape.of(leaf), weakref.ref(leaf), storage, linked, None)
        if isinstance(leaf, _PLAIN):
            return cls(None, None, None, -1, leaf)
        try:
            return cls(None, None, None, -1, weakref.ref(leaf))
        except TypeError:
            return cls(None, None, None, -1, object())  # like nothing else

    def is_like(self, other: _Leaf) -> bool:
        """Whether a call with this value does what one with the other value did."""
        if self.shape != other.shape or self.linked != other.linked:
            return False
        if self.shape is None:
            if isinstance(self.value, weakref.ref) and isinstance(other.value, weakref.ref):
                return self.value() is not None and self.value() is other.value()
            return type(self.value) is type(other.value) and bool(self.value == other.value)
        if self.linked >= 0:
            return True
        assert self.storage is not None and other.storage is not None
        return self.storage() is not None and self.storage() is other.storage()


class _Values(NamedTuple):
    """What a call gets or returns."""

    structure: TreeSpec
    leaves: tuple[_Leaf, ...]

    @classmethod
    def of(cls, values: object, results: Sequence[_Leaf] = ()) -> _Values:
        leaves, structure = tree_flatten(values)
        return cls(structure, tuple(_Leaf.of(leaf, results) for leaf in leaves))

    def is_like(self, other: _Values) -> bool:
        """Whether a call with these does what one with the others did."""
        if self.structure != other.structure:
            return False
        return all(mine.is_like(its) for mine, its in zip(self.leaves, other.leaves, strict=True))


class RepeatedBlocks:
    """Leaves out blocks of a model in a simulation.

    Args:
        simulation: Under way.
        model: With everything applied to it that is simulated, but for the simulation's own hooks.
        blocks: Names, in the order in which they run.
        units: What each rank of a pipeline holds.
    """

    def __init__(
        self, simulation: Simulation, model: nn.Module, blocks: Sequence[str], units: Sequence[Sequence[HeldUnit]]
    ) -> None:
        self._simulation, self._names = simulation, tuple(blocks)
        self._modules = [model.get_submodule(name) for name in blocks]
        kinds, counted = kinds_of(model, blocks, units)
        self._alike: dict[int, Alike] = {}
        self._looked_at: list[str] = []
        for alike in find_alike(kinds):
            self._alike |= dict.fromkeys(range(alike.start, alike.end), alike)
        if self._alike:
            self._hide(counted)
        self._by_name = frozenset(self._names[index] for index in self._alike)
        self._last = -1
        self._taken = 0
        """Entries of the books when the block that ran last had ended."""
        self._following = 0
        """How many blocks have been called one behind the other."""
        self._begin = self._floor = self._left = 0
        self._given: dict[int, _Values] = {}
        self._returned: dict[int, _Values] = {}
        self._times: dict[int, int] = {}
        self._left_out: dict[int, bool] = {}
        self._copies: dict[int, int] = {}
        """First block of a run → blocks that were left out behind it."""

    def _hide(self, counted: Sequence[Counted]) -> None:
        """Put what counts blocks out of reach."""
        for module, name in counted:
            setattr(module, name, _Hidden(f"{type(module).__name__}.{name}", self._looked_at))

    @property
    def leaves_out(self) -> bool:
        """Whether there is anything to leave out."""
        return bool(self._alike)

    def attach(self) -> None:
        """Step between the callers of blocks and the blocks, around all hooks. Hooks that come later find the books at
        the block's place."""
        for index in self._alike:
            # `nn.Module.__call__` takes it in place of `_call_impl`, which runs the hooks.
            self._modules[index]._compiled_call_impl = partial(self._call, index)
            self._modules[index].register_forward_hook(partial(self._await_gradients, index))

    def block_of(self, name: str) -> str:
        """The block that a module is, or is inside of; empty: none."""
        while name:
            if name in self._by_name:
                return name
            name = name.rpartition(".")[0]
        return ""

    def runs(self) -> list[SimulatedRun]:
        """Blocks that ran for others, and for how many periods.

        Raises:
            NotAlike: The model's code looked at a number that counts blocks.
        """
        if self._looked_at:
            raise NotAlike(f"{self._looked_at[0]} is looked at")
        found = []
        for begin, left_out in self._copies.items():
            period = self._alike[begin].period
            end = begin + simulated_periods(period) * period
            found.append(SimulatedRun(self._names[begin:end], period, left_out // period))
        return found

    def _call(self, index: int, *args: object, **kwargs: object) -> Any:
        follows = index > 0 and self._last == index - 1
        before = self._returned[index - 1].leaves if follows else ()
        given = _Values.of((args, kwargs), before)
        self._following = self._following + 1 if follows else 0
        leaves_out = self._leaves_out(index, given)
        self._given[index], self._last = given, index
        ledger = self._simulation.ledger
        if leaves_out:
            if ledger.taken != self._taken:
                raise NotAlike(f"something is made in front of {self._names[index]}")
            ledger.enter(BookedWork("", index, ""))
            outputs = self._handed_on(index, given)
            self._returned[index] = _Values.of(outputs)
            return outputs
        number = self._times[index] = self._times.get(index, -1) + 1
        ledger.enter(BookedWork(FORWARD, number, self._names[index]))
        outputs = self._modules[index]._call_impl(*args, **kwargs)
        self._taken = ledger.taken
        self._returned[index] = _Values.of(outputs)
        return outputs

    def _await_gradients(self, index: int, _module: nn.Module, _args: object, outputs: object) -> None:
        """The block's backward pass begins with the first gradient of what it made."""
        came = _Came(self._simulation.ledger, BookedWork(BACKWARD, self._times[index], self._names[index]))
        given = self._given[index].leaves
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and _Leaf.of(tensor, given).linked < 0:
                tensor.register_hook(came)

    def _leaves_out(self, index: int, given: _Values) -> bool:
        alike = self._alike[index]
        is_like = self._is_like_before(index, given)
        if index in self._left_out:
            if self._left_out[index] and not is_like:
                raise NotAlike(f"{self._names[index]} is called otherwise another time")
            return self._left_out[index]
        self._left_out[index] = found = self._may_leave_out(index, alike, is_like=is_like)
        if found:
            self._copies[self._begin] = self._copies.get(self._begin, 0) + 1
        return found

    def _is_like_before(self, index: int, given: _Values) -> bool:
        """Whether the block is called as the one a period before was."""
        alike = self._alike[index]
        before = index - alike.period
        return before >= alike.start and self._following >= alike.period and given.is_like(self._given[before])

    def _may_leave_out(self, index: int, alike: Alike, *, is_like: bool) -> bool:
        period = alike.period
        if self._left:
            if not is_like:
                raise NotAlike(f"{self._names[index]} is called otherwise than {self._names[index - period]}")
            self._left -= 1
            if not self._left:
                self._floor = index + 1
            return True
        if index == alike.start or not self._following:
            self._begin = self._floor = index
        elif not is_like:
            self._begin = max(self._floor, index - period)
        ran = index - self._begin - self._copies.get(self._begin, 0)
        if not is_like or ran < simulated_periods(period) * period or ran % period or index + period > alike.end:
            return False
        self._left, self._floor = period - 1, index + 1
        return True

    def _handed_on(self, index: int, given: _Values) -> object:
        """What a block returns that is as good as not there: what it was given, in the place of what came out of the
        block before."""
        example = self._returned[index - self._alike[index].period]
        own = {leaf.linked: leaf for leaf in given.leaves if leaf.linked >= 0}
        leaves: list[object] = []
        for number, leaf in enumerate(example.leaves):
            if leaf.shape is None:
                if isinstance(leaf.value, weakref.ref) or not isinstance(leaf.value, _PLAIN):
                    raise NotAlike(f"{self._names[index]} returns an object")
                leaves.append(leaf.value)
                continue
            if number not in own or own[number].shape != leaf.shape:
                raise NotAlike(f"{self._names[index]} returns what the next block does not get")
            tensor = own[number].tensor
            leaves.append(None if tensor is None else tensor())
        return tree_unflatten(leaves, example.structure)


class _Came:
    """Hook on the results of a block: its backward pass begins with the first gradient."""

    def __init__(self, ledger: MemoryLedger, place: BookedWork) -> None:
        self._ledger, self._place, self._has_come = ledger, place, False

    def __call__(self, _: torch.Tensor) -> None:
        if not self._has_come:
            self._has_come = True
            self._ledger.enter(self._place)


class _Hidden:
    """A number that may be handed on, and not be looked at."""

    def __init__(self, name: str, looked_at: list[str]) -> None:
        self._name, self._looked_at = name, looked_at

    def _look(self, *_: object) -> NoReturn:
        self._looked_at.append(self._name)  # an error may be caught on its way
        raise NotAlike(f"{self._name} is looked at")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _look  # type: ignore[assignment]
    __hash__ = __index__ = __int__ = __float__ = __bool__ = __format__ = __str__ = _look  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __pow__ = __neg__ = _look
    __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = _look
