"""Declarative key maps: how the tensors of one layout become those of another.

A rule names source and target patterns and the operations between them. Applying a map reads nothing: it gives steps,
each of which says which stored keys it uses up and which target tensors they make, and the ledger proves that every
key is used exactly once. A map without reordering can be turned round.

    Rule("blocks.{n}.attn.{part}.weight", "layers.{n}.self_attention.{part}.weight")                      # rename
    Rule(("{at}.q.weight", "{at}.k.weight", "{at}.v.weight"), "{at}.qkv.weight", (Concat(0),))            # merge
    Rule(("{at}.experts.{e}.gate.weight", "{at}.experts.{e}.up.weight"), "{at}.experts.gate_up", (Stack(0), Concat(1)))

`{name}` stands for one part of a key between dots, `{name*}` for any number of them. A placeholder that only the
sources have is collected, in numerical order, and one that only the targets have is dealt out.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from mindspeed_mm.checkpoint.lazy_tensor import (
    Agreeing,
    Concatenated,
    LazyTensor,
    Reordered,
    Selected,
    Sliced,
    Stacked,
    Transposed,
    Zeros,
)
from mindspeed_mm.core.errors import ModelFolderError, Problem

_MOST_DIGITS = 18

Column = list[LazyTensor]
"""The tensors of one pattern: one, or as many as a collected placeholder has values."""


class Op(ABC):
    """An operation on the columns of a rule, one column for each pattern."""

    def apply(self, columns: list[Column]) -> list[Column]:
        """The columns after the operation."""
        return self._apply(columns)

    @property
    def inverse(self) -> Op:
        """The operation that undoes this one."""
        return self._inverse()

    @abstractmethod
    def _apply(self, columns: list[Column]) -> list[Column]: ...

    @abstractmethod
    def _inverse(self) -> Op: ...


@dataclass(frozen=True)
class Concat(Op):
    """All columns into one, one after another along `dim`. `sizes` or `ratio` are needed to undo other than two equal
    ones."""

    dim: int
    sizes: tuple[int, ...] | None = None
    ratio: tuple[int, ...] | None = None

    def _apply(self, columns: list[Column]) -> list[Column]:
        return [[Concatenated([tensor for column in columns for tensor in column], self.dim)]]

    def _inverse(self) -> Op:
        return Split(self.dim, self.sizes, ratio=self.ratio)


@dataclass(frozen=True)
class Split(Op):
    """One column into several along `dim`: into `sizes`, into lengths in a `ratio` such as (1, 1, 1, 4), or into
    `parts` equal ones."""

    dim: int
    sizes: tuple[int, ...] | None = None
    parts: int | None = None
    ratio: tuple[int, ...] | None = None

    def _apply(self, columns: list[Column]) -> list[Column]:
        ((base,),) = columns
        length, sizes = base.shape[self.dim], self.sizes
        if sizes is None:
            ratio = self.ratio or (1,) * (self.parts or 2)
            sizes = tuple(length // sum(ratio) * share for share in ratio)
        if sum(sizes) != length:
            raise ValueError(f"cannot split {length} into {sizes}")
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [[Sliced(base, self.dim, start, size)] for start, size in zip(starts, sizes, strict=True)]

    def _inverse(self) -> Op:
        return Concat(self.dim, self.sizes, self.ratio or ((1,) * self.parts if self.parts else None))


@dataclass(frozen=True)
class Stack(Op):
    """Each column's collected tensors into one with a new dim."""

    dim: int = 0

    def _apply(self, columns: list[Column]) -> list[Column]:
        return [[Stacked(column, self.dim)] for column in columns]

    def _inverse(self) -> Op:
        return Unstack(self.dim)


@dataclass(frozen=True)
class Unstack(Op):
    """Each column's one tensor into those along `dim`."""

    dim: int = 0

    def _apply(self, columns: list[Column]) -> list[Column]:
        return [[Selected(base, self.dim, i) for i in range(base.shape[self.dim])] for (base,) in columns]

    def _inverse(self) -> Op:
        return Stack(self.dim)


@dataclass(frozen=True)
class Transpose(Op):
    """Two dims of every tensor swapped."""

    dim0: int = 0
    dim1: int = 1

    def _apply(self, columns: list[Column]) -> list[Column]:
        return [[Transposed(tensor, self.dim0, self.dim1) for tensor in column] for column in columns]

    def _inverse(self) -> Op:
        return self


@dataclass(frozen=True)
class Reorder(Op):
    """Positions along `dim` in another order: new position i is old position `order[i]`."""

    dim: int
    order: tuple[int, ...]

    def _apply(self, columns: list[Column]) -> list[Column]:
        order = torch.tensor(self.order)
        return [[Reordered(tensor, self.dim, order) for tensor in column] for column in columns]

    def _inverse(self) -> Op:
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return Reorder(self.dim, tuple(back))


@dataclass(frozen=True)
class ReorderParts(Op):
    """`dim` as equal parts in another order: new part i is old part `order[i]`. (1, 0) swaps two halves."""

    dim: int
    order: tuple[int, ...]

    def _apply(self, columns: list[Column]) -> list[Column]:
        return [[self._reordered(tensor) for tensor in column] for column in columns]

    def _reordered(self, tensor: LazyTensor) -> LazyTensor:
        length, rest = divmod(tensor.shape[self.dim], len(self.order))
        if rest:
            raise ValueError(f"{tensor.shape[self.dim]} rows are no {len(self.order)} equal parts")
        return Concatenated([Sliced(tensor, self.dim, part * length, length) for part in self.order], self.dim)

    def _inverse(self) -> Op:
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return ReorderParts(self.dim, tuple(back))


@dataclass(frozen=True)
class Interleave(Op):
    """Columns into one, along `dim`, by turns: of `groups` equal runs of each, the first of every column, then the
    second of every column, and so on. Megatron's fused query, key and value stand so: a group's queries, its key, its
    value.

    `sizes`, those of the columns along the dim, undo it.
    """

    dim: int
    groups: int
    sizes: tuple[int, ...]

    def _apply(self, columns: list[Column]) -> list[Column]:
        found = tuple(tensor.shape[self.dim] for (tensor,) in columns)
        if found != self.sizes or any(size % self.groups for size in found):
            raise ValueError(f"cannot interleave {found} in {self.groups} groups, expected {self.sizes}")
        runs = [
            Sliced(
                tensor, self.dim, group * (tensor.shape[self.dim] // self.groups), tensor.shape[self.dim] // self.groups
            )
            for group in range(self.groups)
            for (tensor,) in columns
        ]
        return [[Concatenated(runs, self.dim)]]

    def _inverse(self) -> Op:
        return Deinterleave(self.dim, self.groups, self.sizes)


@dataclass(frozen=True)
class Deinterleave(Op):
    """What `Interleave` joined, apart again."""

    dim: int
    groups: int
    sizes: tuple[int, ...]

    def _apply(self, columns: list[Column]) -> list[Column]:
        ((base,),) = columns
        if base.shape[self.dim] != sum(self.sizes):
            raise ValueError(f"cannot take {base.shape[self.dim]} apart into {self.sizes}")
        each = [size // self.groups for size in self.sizes]
        return [
            [
                Concatenated(
                    [Sliced(base, self.dim, g * sum(each) + sum(each[:i]), size) for g in range(self.groups)], self.dim
                )
            ]
            for i, size in enumerate(each)
        ]

    def _inverse(self) -> Op:
        return Interleave(self.dim, self.groups, self.sizes)


@dataclass(frozen=True)
class SwapTo(Op):
    """The last two dims of every tensor swapped where that gives it `shape`: of experts, which folders hold either way
    round. On the way back they are swapped unless `back_as_is`."""

    shape: tuple[int, ...]
    back_as_is: bool

    def _apply(self, columns: list[Column]) -> list[Column]:
        return [[self._swapped(tensor) for tensor in column] for column in columns]

    def _swapped(self, tensor: LazyTensor) -> LazyTensor:
        swapped = Transposed(tensor, -2 % len(self.shape), -1 % len(self.shape))
        if tensor.shape == swapped.shape == self.shape:
            raise ValueError(f"{self.shape} ends in a square: its shape does not show whether it is stored transposed")
        if self.shape not in (tensor.shape, swapped.shape):
            raise ValueError(f"its shape is {tensor.shape}, expected {self.shape} or its last two dims swapped")
        return tensor if tensor.shape == self.shape else swapped

    def _inverse(self) -> Op:
        last = len(self.shape) - 1
        return _Same() if self.back_as_is else Transpose(last - 1, last)


@dataclass(frozen=True)
class _Same(Op):
    def _apply(self, columns: list[Column]) -> list[Column]:
        return columns

    def _inverse(self) -> Op:
        return self


@dataclass(frozen=True)
class Duplicate(Op):
    """One column into two that hold the same. On the way back the two must be equal."""

    def _apply(self, columns: list[Column]) -> list[Column]:
        (column,) = columns
        return [column, column]

    def _inverse(self) -> Op:
        return Agree()


@dataclass(frozen=True)
class Agree(Op):
    """Two columns that hold the same into one; unequal values are refused when they are read."""

    def _apply(self, columns: list[Column]) -> list[Column]:
        return [[Agreeing(copies, ["one copy", "another copy"]) for copies in zip(*columns, strict=True)]]

    def _inverse(self) -> Op:
        return Duplicate()


@dataclass(frozen=True)
class InsertZeros(Op):
    """A further column of zeros as column `position`, like the first column. On the way back it is left out."""

    position: int

    def _apply(self, columns: list[Column]) -> list[Column]:
        like = columns[0][0]
        return [*columns[: self.position], [Zeros(like.shape, like.dtype)], *columns[self.position :]]

    def _inverse(self) -> Op:
        return Drop(self.position)


@dataclass(frozen=True)
class Drop(Op):
    """Leaves column `position` out."""

    position: int

    def _apply(self, columns: list[Column]) -> list[Column]:
        return columns[: self.position] + columns[self.position + 1 :]

    def _inverse(self) -> Op:
        return InsertZeros(self.position)


@dataclass(frozen=True)
class RuleMatch:
    """One application of a rule: these stored keys, all of each, make these tensors."""

    sources: tuple[str, ...]
    targets: Mapping[str, LazyTensor]


class KeyRule:
    """One line of a key map. Patterns may be given as one string or several."""

    def __init__(self, sources: str | Sequence[str], targets: str | Sequence[str], ops: Sequence[Op] = ()) -> None:
        self.sources = (sources,) if isinstance(sources, str) else tuple(sources)
        self.targets = (targets,) if isinstance(targets, str) else tuple(targets)
        self.ops = tuple(ops)

    @property
    def inverse(self) -> KeyRule:
        """The rule that leads back."""
        return KeyRule(self.targets, self.sources, [op.inverse for op in reversed(self.ops)])

    @cached_property
    def regexes(self) -> list[re.Pattern[str]]:
        """One for each source pattern."""
        return [_compile(pattern) for pattern in self.sources]

    @cached_property
    def shared(self) -> list[str]:
        """Placeholders that sources and targets have in common: one application for each of their values."""
        return [name for name in _names(self.sources) if name in _names(self.targets)]

    def build(self, columns: list[list[tuple[str, dict[str, str]]]], tensors: Mapping[str, LazyTensor]) -> RuleMatch:
        """One application.

        Args:
            columns: For each source pattern its matches, a key with its placeholders' values.
            tensors: The tensors by key.

        Raises:
            ModelFolderError: A source is absent, or shapes do not fit the operations.
        """
        _check_complete(self, columns)
        work: list[Column] = [[tensors[key] for key, _ in column] for column in columns]
        values = {name: columns[0][0][1][name] for name in self.shared}
        keys = tuple(key for column in columns for key, _ in column)
        try:
            for op in self.ops:
                work = op.apply(work)
            made = [self._named(pattern, column, values) for pattern, column in zip(self.targets, work, strict=True)]
        except (ValueError, IndexError) as error:
            raise ModelFolderError(f"{error} (rule {self})", key=keys[0]) from error
        return RuleMatch(keys, {key: tensor for column in made for key, tensor in column})

    def _named(self, pattern: str, column: Column, values: dict[str, str]) -> list[tuple[str, LazyTensor]]:
        dealt = [name for name in _names([pattern]) if name not in values]
        if not dealt and len(column) == 1:
            return [(_fill(pattern, values), column[0])]
        if len(dealt) != 1:
            raise ValueError(f"{len(column)} tensors for the one target {pattern}")
        return [(_fill(pattern, values | {dealt[0]: str(i)}), tensor) for i, tensor in enumerate(column)]

    def __repr__(self) -> str:
        return f"{' + '.join(self.sources)} -> {' + '.join(self.targets)}"


class KeyMap:
    """Rules in order; a key goes to the first that takes it.

    Args:
        rules: The rules.
        keep_others: Pass a key that no rule takes on under its own name, instead of leaving it over.
    """

    def __init__(self, rules: Iterable[KeyRule], *, keep_others: bool = False) -> None:
        self.rules, self.keep_others = list(rules), keep_others

    @property
    def inverse(self) -> KeyMap:
        """The map that leads back."""
        return KeyMap([rule.inverse for rule in self.rules], keep_others=self.keep_others)

    def steps(self, tensors: Mapping[str, LazyTensor]) -> list[RuleMatch]:
        """What becomes of these tensors. Keys that no rule takes are in no step."""
        groups: dict[tuple[int, tuple[str, ...]], list[list[tuple[str, dict[str, str]]]]] = {}
        others: list[str] = []
        for key in sorted(tensors, key=natural_order):
            found = self._match(key)
            if found is None:
                others.append(key)
                continue
            position, column, values = found
            rule = self.rules[position]
            group = (position, tuple(values.get(name, "") for name in rule.shared))
            groups.setdefault(group, [[] for _ in rule.sources])[column].append((key, values))
        steps = [self.rules[position].build(columns, tensors) for (position, _), columns in groups.items()]
        return steps + [RuleMatch((key,), {key: tensors[key]}) for key in others if self.keep_others]

    def _match(self, key: str) -> tuple[int, int, dict[str, str]] | None:
        for position, rule in enumerate(self.rules):
            for column, regex in enumerate(rule.regexes):
                if match := regex.fullmatch(key):
                    return position, column, match.groupdict()
        return None


def check_used_once(steps: Iterable[RuleMatch], sources: Iterable[str], targets: Iterable[str]) -> None:
    """The ledger: every source key used exactly once, every target key made exactly once.

    Raises:
        ModelFolderError: Naming the keys (the first five of each kind, and how many there are).
    """
    steps = list(steps)
    used = Counter(key for step in steps for key in step.sources)
    made = Counter(key for step in steps for key in step.targets)
    problems = [
        *_listed("is not used", [key for key in sources if used[key] == 0]),
        *_listed("is used more than once", [key for key, times in used.items() if times > 1]),
        *_listed("is not made", [key for key in targets if made[key] == 0]),
        *_listed("is made more than once", [key for key, times in made.items() if times > 1]),
        *_listed("is made but not wanted", [key for key in made if key not in set(targets)]),
    ]
    if problems:
        raise ModelFolderError("the key map does not fit", problems=problems)


def natural_order(key: str) -> list[tuple[int, str]]:
    """Sort key that puts `layers.2` before `layers.10`."""
    return [(int(part), "") if is_number(part) else (-1, part) for part in key.split(".")]


def is_number(part: str) -> bool:
    """Whether a part of a key is a number as programs write it: ASCII digits, and not thousands of them."""
    return part.isascii() and part.isdecimal() and len(part) <= _MOST_DIGITS


def _listed(what: str, keys: Sequence[str], most: int = 5) -> list[Problem]:
    more = [Problem(f"and {len(keys) - most} more")] if len(keys) > most else []
    return [Problem(what, key=key) for key in keys[:most]] + more


_PLACEHOLDER = re.compile(r"\{(\w+)(\*?)\}")


def _compile(pattern: str) -> re.Pattern[str]:
    text, position, seen = "", 0, set()
    for match in _PLACEHOLDER.finditer(pattern):
        name = match[1]
        value = f"(?P={name})" if name in seen else f"(?P<{name}>{'.+' if match[2] else '[^.]+'})"
        text += re.escape(pattern[position : match.start()]) + value
        position = match.end()
        seen.add(name)
    return re.compile(text + re.escape(pattern[position:]))


def _names(patterns: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(match[1] for pattern in patterns for match in _PLACEHOLDER.finditer(pattern)))


def _fill(pattern: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: values[match[1]], pattern)


def _check_complete(rule: KeyRule, columns: list[list[tuple[str, dict[str, str]]]]) -> None:
    present = [key for column in columns for key, _ in column]
    for pattern, column in zip(rule.sources, columns, strict=True):
        if not column:
            raise ModelFolderError(f"there is nothing for '{pattern}' beside it (rule {rule})", key=present[0])
        collected = [name for name in _names([pattern]) if name not in rule.shared]
        indices = [values[name] for _, values in column for name in collected]
        if collected and indices != [str(i) for i in range(len(column))]:
            raise ModelFolderError(f"'{pattern}' is not numbered from 0 without holes: {indices}", key=present[0])
