"""Which blocks of a model are of one kind: what one of them does in a simulated step, the others do, too.

Blocks are compared in pairs, down to the last attribute: classes, parameters and how the plan cuts them, buffers,
hooks, replaced forwards and their closures, settings. A number that counts the blocks (`layer_idx`) may differ; it is
put out of reach while the blocks are simulated, and whoever looks at it ends the simulation by kinds.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from mindspeed_mm.fsdp.tools.memory_model.simulation import pattern_of
from mindspeed_mm.fsdp.tools.memory_model.static_part import HeldUnit

_LONGEST_PERIOD = 12
_SMALL_NUMEL = 1 << 16
"""Tensors that are no parameters are compared by their values up to this size."""
_HOOKS = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_backward_hooks": (),
    "_backward_pre_hooks": (),
}
"""Hooks by the number of their handle, and what is noted beside them by the same number."""
_OF_STATE_DICTS = frozenset(
    {"_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
)
_PLAIN = (bool, int, float, complex, bytes, type, range, torch.dtype, torch.device, torch.Size, frozenset, set)


def simulated_periods(period: int) -> int:
    """How many periods of so many blocks are simulated: the first and the last may differ from those between, and two
    of those are compared. What the first block or the last hands to its neighbour may differ, too: where a period is
    one block, there is one more to compare."""
    if period == 1:
        return 5
    return 4


class Alike(NamedTuple):
    """Blocks that follow one another, in which the same kinds repeat themselves."""

    start: int
    end: int
    """Behind the last block of the last whole period."""
    period: int


def find_alike(kinds: Sequence[int], longest: int = _LONGEST_PERIOD) -> list[Alike]:
    """Where more periods follow one another than are simulated.

    Args:
        kinds: Of the blocks, in the order in which they run.
        longest: Blocks of a period, at most.
    """
    found, start = [], 0
    while start < len(kinds):
        best, saved = None, 0
        for period in range(1, longest + 1):
            end = start + period
            while end < len(kinds) and kinds[end] == kinds[end - period]:
                end += 1
            periods = (end - start) // period
            left_out = (periods - simulated_periods(period)) * period
            if left_out > saved:
                best, saved = Alike(start, start + periods * period, period), left_out
        if best is not None:
            found.append(best)
        start = start + 1 if best is None else best.end
    return found


class Counted(NamedTuple):
    """An attribute of a module that counts the blocks."""

    module: nn.Module
    name: str


def kinds_of(
    model: nn.Module, blocks: Sequence[str], units: Sequence[Sequence[HeldUnit]]
) -> tuple[list[int], list[Counted]]:
    """A number for each block, equal for those of one kind, and what counts them.

    Args:
        model: With everything applied to it that is simulated, but for the simulation's own hooks.
        blocks: Names, in the order in which they run.
        units: What each rank of a pipeline holds.
    """
    roles = _roles(units)
    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    examples: list[_ComparedBlock] = []
    kinds: list[int] = []
    counted: dict[tuple[int, str], Counted] = {}
    for number, name in enumerate(blocks):
        block = _ComparedBlock(model, name, number)
        for kind in reversed(range(len(examples))):  # the latest kind most likely is this block's, too
            likeness = _Likeness(examples[kind], block, roles, owners)
            if likeness.holds():
                kinds.append(kind)
                counted |= {(id(each.module), each.name): each for each in likeness.counted}
                break
        else:
            kinds.append(len(examples))
            examples.append(block)
    return kinds, list(counted.values())


class _Role(NamedTuple):
    """What a rank of a pipeline holds of a parameter, and with which modules it is gathered."""

    rank: int
    shards: int
    names: tuple[str, ...]
    held: tuple[object, ...]


def _roles(units: Sequence[Sequence[HeldUnit]]) -> dict[str, list[_Role]]:
    """Those of each parameter, by name."""
    roles: dict[str, list[_Role]] = {}
    for rank, of_rank in enumerate(units):
        for unit in of_rank:
            for held in unit.parameters:
                of_one = (held.shape, held.computed, held.numel, held.padded_numel, held.dtype, held.is_trained)
                roles.setdefault(held.name, []).append(_Role(rank, unit.shards, unit.names, of_one))
    return roles


class _ComparedBlock:
    """A block, with the places of its modules and parameters in it."""

    def __init__(self, model: nn.Module, name: str, number: int) -> None:
        self.name, self.number, self.module = name, number, model.get_submodule(name)
        self.modules = dict(self.module.named_modules())
        self.places: dict[int, str] = {id(module): place for place, module in self.modules.items()}
        for place, parameter in self.module.named_parameters(remove_duplicate=False):
            self.places.setdefault(id(parameter), f"{place} (parameter)")

    def below(self, name: str) -> str:
        """A name without that of the block; any other text as it is."""
        if f"{name}.".startswith(f"{self.name}."):
            return name[len(self.name) :]
        return name

    def inside(self, role: _Role) -> _Role:
        """A parameter's role, with names below the block instead of whole ones."""
        return role._replace(names=tuple(map(self.below, role.names)))


class _Likeness:
    """Whether two blocks are of one kind. What stands inside the one corresponds to what stands there in the other;
    what lies outside of both is the same object, or equal through and through."""

    def __init__(
        self, left: _ComparedBlock, right: _ComparedBlock, roles: Mapping[str, list[_Role]], owners: Mapping[int, int]
    ) -> None:
        self._left, self._right, self._roles, self._owners = left, right, roles, owners
        self._seen: dict[tuple[int, int], object] = {}
        self.counted: list[Counted] = []

    def holds(self) -> bool:
        left, right = self._left, self._right
        if pattern_of(left.name) != pattern_of(right.name) or left.modules.keys() != right.modules.keys():
            return False
        pairs = zip(left.modules.values(), right.modules.values(), strict=True)
        return all(self._modules_alike(*pair) for pair in pairs) and self._parameters_alike()

    def _parameters_alike(self) -> bool:
        others = dict(self._right.module.named_parameters(remove_duplicate=False))
        for place, left in self._left.module.named_parameters(remove_duplicate=False):
            right = others.pop(place, None)
            if right is None or self._owners[id(left)] > 1 or self._owners[id(right)] > 1:  # shared with other modules
                return False
            if not _same_layout(left, right) or not self._held_alike(place):
                return False
        return not others

    def _held_alike(self, place: str) -> bool:
        """Ranks hold as much of both, gathered together with the same."""
        roles = [self._roles.get(f"{block.name}.{place}", []) for block in (self._left, self._right)]
        inside = []
        for block, of_block in zip((self._left, self._right), roles, strict=True):
            inside.append([block.inside(role) for role in of_block])
        return inside[0] == inside[1]

    def _modules_alike(self, left: nn.Module, right: nn.Module) -> bool:
        if type(left) is not type(right):
            return False
        mine, other = vars(left), vars(right)
        if mine.keys() != other.keys():
            return False
        for name, value in mine.items():
            if name in _OF_STATE_DICTS or any(name in beside for beside in _HOOKS.values()):
                continue
            if name in _HOOKS:
                alike = self._alike(_hooks_of(left, name), _hooks_of(right, name))
            else:
                alike = self._alike(value, other[name]) or self._counts(left, right, name)
            if not alike:
                return False
        return True

    def _counts(self, left: nn.Module, right: nn.Module, name: str) -> bool:
        """Whether an attribute is a number that differs as the blocks' own numbers do."""
        mine, other = vars(left)[name], vars(right)[name]
        if type(mine) is not int or type(other) is not int:
            return False
        if other - mine != self._right.number - self._left.number:
            return False
        self.counted += [Counted(left, name), Counted(right, name)]
        return True

    def _alike(self, left: Any, right: Any) -> bool:
        places = self._left.places.get(id(left)), self._right.places.get(id(right))
        if places != (None, None):
            return places[0] == places[1]
        if left is right:
            return True
        if type(left) is not type(right) or isinstance(left, nn.Module):
            return False
        if isinstance(left, str):  # some keep their own full name
            return self._left.below(left) == self._right.below(right)
        if isinstance(left, _PLAIN):
            return bool(left == right)
        if (id(left), id(right)) in self._seen:
            return True
        self._seen[id(left), id(right)] = left, right  # kept, so that their numbers are not given to others
        if isinstance(left, torch.Tensor):
            return _same_layout(left, right) and _same_values(left, right)
        return self._parts_alike(left, right)

    def _parts_alike(self, left: Any, right: Any) -> bool:
        if isinstance(left, dict):
            return self._all_alike(left, right) and self._all_alike(left.values(), right.values())
        if isinstance(left, (list, tuple)):
            return self._all_alike(left, right)
        parts = _made_of(left), _made_of(right)
        if parts[0] is None or parts[1] is None:
            return False
        return self._alike(*parts)

    def _all_alike(self, left: Any, right: Any) -> bool:
        return len(left) == len(right) and all(self._alike(*pair) for pair in zip(left, right, strict=True))


def _made_of(value: object) -> list[object] | None:
    """What an object is made of; None: nobody knows, so it is like no other."""
    if isinstance(value, FunctionType):
        return [value.__code__.co_code, value.__code__.co_consts, value.__code__.co_names, value.__code__.co_freevars,
                value.__globals__, value.__closure__, value.__defaults__, value.__kwdefaults__]  # fmt: skip
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, CellType):
        return [value.cell_contents]
    if isinstance(value, weakref.ref):
        return [value()]
    if not hasattr(value, "__dict__") or any("__slots__" in vars(cls) for cls in type(value).__mro__):
        return None
    return [vars(value)]


def _hooks_of(module: nn.Module, name: str) -> list[object]:
    """Hooks in order, each with what is noted of it; the numbers of their handles mean nothing."""
    found: list[object] = []
    for number, hook in vars(module)[name].items():
        found.append((hook, *(number in vars(module)[beside] for beside in _HOOKS[name])))
    return found


def _same_layout(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        left.shape == right.shape
        and left.dtype == right.dtype
        and left.device == right.device
        and left.requires_grad == right.requires_grad
        and left.stride() == right.stride()
    )


def _same_values(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.is_meta:
        return True
    return left.numel() <= _SMALL_NUMEL and torch.equal(left, right)
