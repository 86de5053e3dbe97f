"""The operations of key maps (`keymap.py`): what happens to tensors between the sources of a rule and its targets.

Nothing is read. Each operation takes columns, one for each pattern of the rule, and knows the one that undoes it.

Which way round a folder holds stacked experts: transformers 5 saves them as its modules have them, the folders that
were released before have the last two dims swapped. Shapes tell it, unless they end in a square.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import chain

import torch

from mindspeed_mm.checkpoint.lazy_tensor import (
    Agreeing,
    Concatenated,
    LazyTensor,
    Reordered,
    Reshaped,
    Selected,
    Stacked,
    Transposed,
    Zeros,
    consecutive,
    stored_keys,
)
from mindspeed_mm.core.errors import ConfigError, first_names

Column = list[LazyTensor]
"""The tensors of one pattern: one, or as many as a collected placeholder has values."""


class Op(ABC):
    """An operation on the columns of a rule, one column for each pattern. Dims are counted from the first, 0."""

    def __post_init__(self) -> None:
        """Refuse a dim that is counted from the last: where one is taken away or added, it would be another.

        Raises:
            ConfigError: Naming the operation.
        """
        for name in ("dim", "dim0", "dim1"):
            if getattr(self, name, 0) < 0:
                raise ConfigError(f"{self} counts a dim from the last", key=name, way_out="Count from the first, 0.")

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


class OpOnEach(Op):
    """An operation that changes every tensor for itself."""

    def _apply(self, columns: list[Column]) -> list[Column]:
        return [list(map(self._changed, column)) for column in columns]

    @abstractmethod
    def _changed(self, tensor: LazyTensor) -> LazyTensor: ...


def _turned_round(order: tuple[int, ...]) -> tuple[int, ...]:
    """The permutation that undoes another: where each old position is found."""
    # An argsort: of a permutation it is the inverse.
    return tuple(sorted(range(len(order)), key=order.__getitem__))


@dataclass(frozen=True)
class Concat(Op):
    """All columns into one, one after another along `dim`. `sizes` or `ratio` are needed to undo other than two equal
    ones."""

    dim: int
    sizes: tuple[int, ...] | None = None
    ratio: tuple[int, ...] | None = None

    def _apply(self, columns: list[Column]) -> list[Column]:
        return [[Concatenated(list(chain.from_iterable(columns)), self.dim)]]

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
        return [[run] for run in consecutive(base, self.dim, sizes)]

    def _inverse(self) -> Op:
        ratio = self.ratio
        if ratio is None and self.parts:
            ratio = (1,) * self.parts
        return Concat(self.dim, self.sizes, ratio)


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
        dealt: list[Column] = []
        for (base,) in columns:
            dealt.append([Selected(base, self.dim, i) for i in range(base.shape[self.dim])])
        return dealt

    def _inverse(self) -> Op:
        return Stack(self.dim)


@dataclass(frozen=True)
class Transpose(OpOnEach):
    """Two dims of every tensor swapped."""

    dim0: int = 0
    dim1: int = 1

    def _changed(self, tensor: LazyTensor) -> LazyTensor:
        return Transposed(tensor, self.dim0, self.dim1)

    def _inverse(self) -> Op:
        return self


@dataclass(frozen=True)
class Reshape(OpOnEach):
    """The same numbers, row after row, in `shape`, such as a convolution over patches as a linear layer's matrix.
    `back` is the shape before, which undoes it and is checked; one length of each may be -1."""

    shape: tuple[int, ...]
    back: tuple[int, ...]

    def _changed(self, tensor: LazyTensor) -> LazyTensor:
        lengths = zip(tensor.shape, self.back, strict=False)
        if len(tensor.shape) != len(self.back) or any(wanted not in (-1, length) for length, wanted in lengths):
            raise ValueError(f"a tensor of shape {tensor.shape} is not {self.back}, of which {self.shape} is made")
        try:
            return Reshaped(tensor, self.shape)
        except RuntimeError as error:
            raise ValueError(f"a tensor of shape {tensor.shape} does not have the shape {self.shape}") from error

    def _inverse(self) -> Op:
        return Reshape(self.back, self.shape)


@dataclass(frozen=True)
class Reorder(OpOnEach):
    """Positions along `dim` in another order: new position i is old position `order[i]`."""

    dim: int
    order: tuple[int, ...]

    def _changed(self, tensor: LazyTensor) -> LazyTensor:
        return Reordered(tensor, self.dim, torch.tensor(self.order))

    def _inverse(self) -> Op:
        return Reorder(self.dim, _turned_round(self.order))


@dataclass(frozen=True)
class ReorderParts(OpOnEach):
    """`dim` as equal parts in another order: new part i is old part `order[i]`. (1, 0) swaps two halves."""

    dim: int
    order: tuple[int, ...]

    def _changed(self, tensor: LazyTensor) -> LazyTensor:
        parts = len(self.order)
        length, rest = divmod(tensor.shape[self.dim], parts)
        if rest:
            raise ValueError(f"{tensor.shape[self.dim]} rows cannot be divided into {parts} equal parts")
        runs = consecutive(tensor, self.dim, [length] * parts)
        return Concatenated([runs[part] for part in self.order], self.dim)

    def _inverse(self) -> Op:
        return ReorderParts(self.dim, _turned_round(self.order))


@dataclass(frozen=True)
class ByHead(OpOnEach):
    """`dim` as `parts` one behind the other, all heads of each, `width` long: into heads one behind the other, each
    with its own of every part."""

    dim: int
    parts: int
    width: int

    def _changed(self, tensor: LazyTensor) -> LazyTensor:
        heads = self._heads(tensor)
        runs = consecutive(tensor, self.dim, [self.width] * (self.parts * heads))
        return Concatenated(
            [runs[part * heads + head] for head in range(heads) for part in range(self.parts)], self.dim
        )

    def _heads(self, tensor: LazyTensor) -> int:
        heads, rest = divmod(tensor.shape[self.dim], self.parts * self.width)
        if rest:
            raise ValueError(f"{tensor.shape[self.dim]} rows are not {self.parts} parts of heads of {self.width}")
        return heads

    def _inverse(self) -> Op:
        return ByPart(self.dim, self.parts, self.width)


@dataclass(frozen=True)
class ByPart(ByHead):
    """What `ByHead` dealt out, part by part again."""

    def _changed(self, tensor: LazyTensor) -> LazyTensor:
        heads = self._heads(tensor)
        runs = consecutive(tensor, self.dim, [self.width] * (self.parts * heads))
        return Concatenated(
            [runs[head * self.parts + part] for part in range(self.parts) for head in range(heads)], self.dim
        )

    def _inverse(self) -> Op:
        return ByHead(self.dim, self.parts, self.width)


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
        runs_of_columns = []
        for (tensor,) in columns:
            length = tensor.shape[self.dim] // self.groups
            runs_of_columns.append(consecutive(tensor, self.dim, [length] * self.groups))
        # Group by group: the first run of every column, then the second of every column.
        by_group = zip(*runs_of_columns, strict=True)
        return [[Concatenated(list(chain.from_iterable(by_group)), self.dim)]]

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
        if base.shape[self.dim] != sum(self.sizes) or any(size % self.groups for size in self.sizes):
            raise ValueError(f"cannot take {base.shape[self.dim]} apart into {self.sizes} of {self.groups} groups")
        lengths = [size // self.groups for size in self.sizes]
        runs = consecutive(base, self.dim, lengths * self.groups)
        # The runs of one column stand as far from each other as there are columns.
        apart = len(lengths)
        return [[Concatenated(runs[column::apart], self.dim)] for column in range(apart)]

    def _inverse(self) -> Op:
        return Interleave(self.dim, self.groups, self.sizes)


@dataclass(frozen=True)
class SwapTo(OpOnEach):
    """The last two dims of every tensor swapped where that gives it `shape`: of experts, which folders hold either way
    round. On the way back they are swapped unless `as_module`, which also says what a square is (`oriented`)."""

    shape: tuple[int, ...]
    as_module: bool | None

    def _changed(self, tensor: LazyTensor) -> LazyTensor:
        swapped = Transposed(tensor, -2 % len(self.shape), -1 % len(self.shape))
        return oriented(tensor, swapped, self.shape, self.as_module)

    def _inverse(self) -> Op:
        last = len(self.shape) - 1
        if self.as_module:
            return _Same()
        return Transpose(last - 1, last)


@dataclass(frozen=True)
class _Same(Op):
    def _apply(self, columns: list[Column]) -> list[Column]:
        return columns

    def _inverse(self) -> Op:
        return self


@dataclass(frozen=True)
class Duplicate(Op):
    """One column into `copies` that hold the same. On the way back they must be equal."""

    copies: int = 2

    def _apply(self, columns: list[Column]) -> list[Column]:
        (column,) = columns
        return [column] * self.copies

    def _inverse(self) -> Op:
        return Agree(self.copies)


@dataclass(frozen=True)
class Agree(Op):
    """`copies` columns that hold the same into one; unequal values are refused when they are read."""

    copies: int = 2

    def _apply(self, columns: list[Column]) -> list[Column]:
        if len(columns) != self.copies:
            raise ValueError(f"{len(columns)} copies of one tensor, and {self.copies} are expected")
        agreed: Column = []
        for parts in zip(*columns, strict=True):
            names = [first_names(list(stored_keys(part))) for part in parts]
            agreed.append(Agreeing(parts, names))
        return [agreed]

    def _inverse(self) -> Op:
        return Duplicate(self.copies)


@dataclass(frozen=True)
class InsertZeros(Op):
    """A further column of zeros as column `position`, like the first column. On the way back it is left out."""

    position: int

    def _apply(self, columns: list[Column]) -> list[Column]:
        # As a bias that one layout has for all projections, and the other for some.
        like = columns[0][0]
        return [*columns[: self.position], [Zeros(like.shape, like.dtype)], *columns[self.position :]]

    def _inverse(self) -> Op:
        return Drop(self.position)


@dataclass(frozen=True)
class Drop(Op):
    """Leaves the column at `position` out. Its inverse inserts a column of zeros there."""

    position: int

    def _apply(self, columns: list[Column]) -> list[Column]:
        return columns[: self.position] + columns[self.position + 1 :]

    def _inverse(self) -> Op:
        return InsertZeros(self.position)


# --- which way round stacked experts lie ------------------------------------------------------------------------------


class UnknownOrder(ValueError):
    """Nobody says which way round a square is stored."""

    way_out = (
        'Say in its config.json which transformers saved it: "transformers_version": "5.0.0" where experts are stored '
        'as the module has them, [E, out, in], "4.57.0" where they are [E, in, out].'
    )


def in_order_of_module(version: object) -> bool | None:
    """Whether a folder holds experts as the module has them.

    Args:
        version: `transformers_version` of its config.json.

    Returns:
        None where nothing is said.
    """
    major = str(version or "").partition(".")[0]
    if major.isdecimal():
        return int(major) >= 5
    return None


def oriented(tensor: LazyTensor, swapped: LazyTensor, shape: tuple[int, ...], as_module: bool | None) -> LazyTensor:
    """Stacked experts in the module's order. The way back is the same: a square that was swapped is swapped again.

    Args:
        tensor: As they are stored.
        swapped: With the last two dims swapped.
        shape: The module's.
        as_module: From `in_order_of_module`, which counts where the shape does not tell.

    Raises:
        ValueError: Neither has the shape.
        UnknownOrder: Both have it, and nothing is said.
    """
    if shape not in (tensor.shape, swapped.shape):
        raise ValueError(f"its shape is {tensor.shape}, expected {shape} or its last two dims swapped")
    if tensor.shape != swapped.shape:
        # The shape tells it: config.json may be of the program that saved it last, not of the weights.
        as_module = tensor.shape == shape
    # A square, and nothing said: a guess would train wrong weights without a sign of it.
    elif as_module is None:
        raise UnknownOrder(f"{shape} ends in a square: its shape does not show which way round it is stored")
    if as_module:
        return tensor
    return swapped
