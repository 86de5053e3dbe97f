"""The operations of key maps (`keymap.py`): what happens to tensors between the sources of a rule and its targets.

Nothing is read. Each operation takes columns, one for each pattern of the rule, and knows the one that undoes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from mindspeed_mm.checkpoint.expert_order import oriented
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
    round. On the way back they are swapped unless `as_module`, which also says what a square is (`oriented`)."""

    shape: tuple[int, ...]
    as_module: bool | None

    def _apply(self, columns: list[Column]) -> list[Column]:
        return [[self._swapped(tensor) for tensor in column] for column in columns]

    def _swapped(self, tensor: LazyTensor) -> LazyTensor:
        swapped = Transposed(tensor, -2 % len(self.shape), -1 % len(self.shape))
        return oriented(tensor, swapped, self.shape, self.as_module)

    def _inverse(self) -> Op:
        last = len(self.shape) - 1
        return _Same() if self.as_module else Transpose(last - 1, last)


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
