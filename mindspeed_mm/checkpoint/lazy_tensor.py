"""Tensors that are described first and read later, region by region, straight into their destination.

A key map is an expression over stored tensors (concatenate, stack, slice, transpose …). Every node can write any
region of itself into a given tensor, so a rank reads no more than its shard and no intermediate copy is made.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch

from mindspeed_mm.core.errors import CheckpointError

Item = TypeVar("Item")

Region = tuple[tuple[int, int], ...]
"""One (start, length) for each dim."""
_ROWS_BYTES = 64 * 2**20
"""Of a tensor whose rows are averaged, read at a time."""


def whole(shape: Sequence[int]) -> Region:
    """The region that covers a tensor."""
    return tuple((0, length) for length in shape)


class LazyTensor(ABC):
    """A tensor known by shape and dtype, read on demand, made of `parts`."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, parts: Sequence[LazyTensor] = ()) -> None:
        self.shape, self.dtype, self.parts = tuple(shape), dtype, tuple(parts)

    @property
    def size_bytes(self) -> int:
        """Bytes of all of it."""
        return math.prod(self.shape) * self.dtype.itemsize

    def copy_to(self, out: torch.Tensor, region: Region) -> None:
        """Write this tensor's `region` into `out`, which has the region's lengths; dtype and device are `out`'s."""
        self._copy_to(out, region)

    def read(self) -> torch.Tensor:
        """All of it, on the CPU: a view of the file where that is possible."""
        out = torch.empty(self.shape, dtype=self.dtype)
        self._copy_to(out, whole(self.shape))
        return out

    @abstractmethod
    def _copy_to(self, out: torch.Tensor, region: Region) -> None: ...


class TensorReader(Protocol):
    """Whatever gives a stored tensor by its key, as a view where it can (a memory-mapped file)."""

    def get_tensor(self, key: str) -> torch.Tensor:
        """The tensor of this key, on the CPU."""
        ...


class Stored(LazyTensor):
    """A tensor that lies in a file."""

    def __init__(self, key: str, shape: Sequence[int], dtype: torch.dtype, reader: Callable[[], TensorReader]) -> None:
        super().__init__(shape, dtype)
        self.key, self._reader = key, reader

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        tensor = self._reader().get_tensor(self.key)
        for dim, (start, length) in enumerate(region):
            tensor = tensor.narrow(dim, start, length)
        # Over to an accelerator in the stored dtype: fewer bytes on the bus, and the cast is done there.
        if out.device != tensor.device:
            tensor = tensor.to(out.device)
        out.copy_(tensor)

    def read(self) -> torch.Tensor:
        """As the file's reader gives it, without a copy where the file is mapped."""
        return self._reader().get_tensor(self.key)


class Concatenated(LazyTensor):
    """Tensors one after another along `dim`."""

    def __init__(self, parts: Sequence[LazyTensor], dim: int) -> None:
        _check_same([_without(part.shape, dim) for part in parts], "concatenate")
        _check_same_dtype(parts, "concatenate")
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        super().__init__(shape, parts[0].dtype, parts)
        self.dim = dim

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        wanted_start, wanted_length = region[self.dim]
        position = 0
        for part in self.parts:
            start = max(wanted_start, position)
            end = min(wanted_start + wanted_length, position + part.shape[self.dim])
            if start < end:
                inner = (*region[: self.dim], (start - position, end - start), *region[self.dim + 1 :])
                part.copy_to(out.narrow(self.dim, start - wanted_start, end - start), inner)
            position += part.shape[self.dim]


class Stacked(LazyTensor):
    """Tensors of one shape along a new dim."""

    def __init__(self, parts: Sequence[LazyTensor], dim: int) -> None:
        _check_same([part.shape for part in parts], "stack")
        _check_same_dtype(parts, "stack")
        super().__init__((*parts[0].shape[:dim], len(parts), *parts[0].shape[dim:]), parts[0].dtype, parts)
        self.dim = dim

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        start, length = region[self.dim]
        inner = (*region[: self.dim], *region[self.dim + 1 :])
        for position in range(length):
            self.parts[start + position].copy_to(out.select(self.dim, position), inner)


class Sliced(LazyTensor):
    """A run of `length` from `start` along `dim`."""

    def __init__(self, base: LazyTensor, dim: int, start: int, length: int) -> None:
        super().__init__((*base.shape[:dim], length, *base.shape[dim + 1 :]), base.dtype, [base])
        self.base, self.dim, self.start = base, dim, start

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        start, length = region[self.dim]
        self.base.copy_to(out, (*region[: self.dim], (self.start + start, length), *region[self.dim + 1 :]))


class Selected(LazyTensor):
    """One position along `dim`, which vanishes."""

    def __init__(self, base: LazyTensor, dim: int, position: int) -> None:
        super().__init__(_without(base.shape, dim), base.dtype, [base])
        self.base, self.dim, self.position = base, dim, position

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        inner = (*region[: self.dim], (self.position, 1), *region[self.dim :])
        self.base.copy_to(out.unsqueeze(self.dim), inner)


class Transposed(LazyTensor):
    """A tensor whose dimensions `dim0` and `dim1` are swapped."""

    def __init__(self, base: LazyTensor, dim0: int, dim1: int) -> None:
        super().__init__(_swapped(base.shape, dim0, dim1), base.dtype, [base])
        self.base, self.dim0, self.dim1 = base, dim0, dim1

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        self.base.copy_to(out.transpose(self.dim0, self.dim1), tuple(_swapped(region, self.dim0, self.dim1)))


class Reordered(LazyTensor):
    """Positions along `dim` in another order: position i of this tensor is position `order[i]` of the base."""

    def __init__(self, base: LazyTensor, dim: int, order: torch.Tensor) -> None:
        super().__init__(base.shape, base.dtype, [base])
        self.base, self.dim, self.order = base, dim, order

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        start, length = region[self.dim]
        run_start = 0
        order = self.order[start : start + length].tolist()
        for position in range(1, length + 1):  # runs of neighbours are copied in one go
            if position < length and order[position] == order[position - 1] + 1:
                continue
            inner = (*region[: self.dim], (order[run_start], position - run_start), *region[self.dim + 1 :])
            self.base.copy_to(out.narrow(self.dim, run_start, position - run_start), inner)
            run_start = position


class Padded(LazyTensor):
    """A tensor with zeros behind it along `dim`, up to `length`."""

    def __init__(self, base: LazyTensor, dim: int, length: int) -> None:
        super().__init__((*base.shape[:dim], length, *base.shape[dim + 1 :]), base.dtype, [base])
        self.base, self.dim = base, dim

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        start, length = region[self.dim]
        held = max(0, min(start + length, self.base.shape[self.dim]) - start)
        out.narrow(self.dim, held, length - held).zero_()
        if held:
            inner = (*region[: self.dim], (start, held), *region[self.dim + 1 :])
            self.base.copy_to(out.narrow(self.dim, 0, held), inner)


class WithRows(LazyTensor):
    """A tensor with other rows at some positions, which may lie behind its last row.

    Args:
        base: The tensor.
        rows: (len(positions), …), what stands at the positions instead.
        positions: In rising order. All rows behind those of `base` are among them.
    """

    def __init__(self, base: LazyTensor, rows: LazyTensor, positions: Sequence[int]) -> None:
        _check_same([_without(base.shape, 0), _without(rows.shape, 0)], "join rows of")
        last = positions[-1] + 1 if positions else 0
        super().__init__((max(base.shape[0], last), *base.shape[1:]), base.dtype, [base, rows])
        self.base, self.rows, self.positions = base, rows, tuple(positions)

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        start, length = region[0]
        held = max(0, min(start + length, self.base.shape[0]) - start)
        if held:
            self.base.copy_to(out.narrow(0, 0, held), ((start, held), *region[1:]))
        first, end = bisect_left(self.positions, start), bisect_left(self.positions, start + length)
        while first < end:  # runs of neighbours are copied in one go
            run = first + 1
            while run < end and self.positions[run] == self.positions[run - 1] + 1:
                run += 1
            piece = out.narrow(0, self.positions[first] - start, run - first)
            self.rows.copy_to(piece, ((first, run - first), *region[1:]))
            first = run


class MeanRows(LazyTensor):
    """`count` equal rows: the mean of the first `of` rows of a tensor, taken in fp64 and rounded to its dtype."""

    def __init__(self, base: LazyTensor, of: int, count: int) -> None:
        super().__init__((count, *base.shape[1:]), base.dtype, [base])
        self.base, self.of = base, of
        self._mean: torch.Tensor | None = None

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        if out.is_meta:  # only what is read and written counts there: see the ledger of a conversion
            out.zero_()
            return
        if self._mean is None:
            self._mean = self._take_mean()
        out.copy_(self._mean[_slices(region[1:])].expand(out.shape))

    def _take_mean(self) -> torch.Tensor:
        total = torch.zeros(self.shape[1:], dtype=torch.float64)
        step = max(1, _ROWS_BYTES // max(1, 8 * math.prod(self.shape[1:])))
        for start in range(0, self.of, step):
            length = min(step, self.of - start)
            rows = torch.empty((length, *self.shape[1:]), dtype=torch.float64)
            self.base.copy_to(rows, ((start, length), *whole(self.shape[1:])))
            total += rows.sum(dim=0)
        return torch.empty(total.shape, dtype=self.dtype).copy_(total / self.of)


class Zeros(LazyTensor):
    """Zeros, for a tensor that one layout has and the other has not."""

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        out.zero_()


class Agreeing(LazyTensor):
    """Copies of one tensor that must be equal: what is read of the first is compared with the others.

    Args:
        parts: The copies.
        names: What each is called in an error.

    Raises:
        CheckpointError: The copies differ in shape or dtype.
    """

    def __init__(self, parts: Sequence[LazyTensor], names: Sequence[str]) -> None:
        first = parts[0]
        for part, name in zip(parts, names, strict=True):
            if (part.shape, part.dtype) != (first.shape, first.dtype):
                raise CheckpointError(
                    f"is {_outline(part)}, and {names[0]} is {_outline(first)}; they should be copies of one tensor",
                    where=name,
                    way_out=_DAMAGED,
                )
        super().__init__(first.shape, first.dtype, parts)
        self.names = tuple(names)

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        # Compared as stored: rounded to `out`'s dtype, different numbers may be equal.
        held = out if out.dtype == self.dtype else torch.empty(out.shape, dtype=self.dtype, device=out.device)
        first, *others = self.parts
        first.copy_to(held, region)
        other = torch.empty_like(held, memory_format=torch.contiguous_format)
        for part, name in zip(others, self.names[1:], strict=True):
            part.copy_to(other, region)
            if not out.is_meta and not _same_numbers(other, held):
                raise CheckpointError(
                    f"differs from {self.names[0]}; they should be copies of one tensor", where=name, way_out=_DAMAGED
                )
        if held is not out:
            out.copy_(held)


_DAMAGED = "The checkpoint is damaged, or was saved while its ranks had drifted apart."


def _same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, or the same bytes: a NaN is not equal to itself."""
    return torch.equal(a, b) or torch.equal(_bytes_of(a), _bytes_of(b))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _outline(tensor: LazyTensor) -> str:
    return f"{tensor.dtype} of shape {list(tensor.shape)}"


class Computed(LazyTensor):
    """The result of a function of whole tensors, for what the nodes above cannot express. Computed at each read."""

    def __init__(
        self,
        parts: Sequence[LazyTensor],
        function: Callable[[list[torch.Tensor]], torch.Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        super().__init__(shape, dtype, parts)
        self.function = function

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        read = [part.read() for part in self.parts]
        if out.is_meta:  # only what is read and written counts there: see the ledger of a conversion
            out.zero_()
            return
        tensor = self.function(read)
        out.copy_(tensor[_slices(region)])


class HeldTensor(LazyTensor):
    """A tensor that is in memory already, behind the interface of lazy ones."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.shape, tensor.dtype)
        self._tensor = tensor

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        out.copy_(self._tensor[_slices(region)])

    def read(self) -> torch.Tensor:
        """The tensor itself, not a copy."""
        return self._tensor


class Cast(LazyTensor):
    """The same numbers in another dtype."""

    def __init__(self, base: LazyTensor, dtype: torch.dtype) -> None:
        super().__init__(base.shape, dtype, [base])
        self.base = base

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        self.base.copy_to(out, region)


class Reshaped(LazyTensor):
    """The same numbers, row after row, in another shape; one length may be -1."""

    def __init__(self, base: LazyTensor, shape: Sequence[int]) -> None:
        super().__init__(torch.empty(base.shape, device="meta").reshape(*shape).shape, base.dtype, [base])
        self.base = base

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        tensor = self.base.read().reshape(self.shape)
        out.copy_(tensor[_slices(region)])

    def read(self) -> torch.Tensor:
        """A view of the base in the new shape, where its layout allows one."""
        return self.base.read().reshape(self.shape)


def consecutive(base: LazyTensor, dim: int, sizes: Sequence[int]) -> list[LazyTensor]:
    """Runs of these lengths along `dim`, one after another from its start."""
    runs: list[LazyTensor] = []
    start = 0
    for size in sizes:
        runs.append(Sliced(base, dim, start, size))
        start += size
    return runs


def stored_keys(tensor: LazyTensor) -> Iterator[str]:
    """The keys of the stored tensors under an expression, in reading order."""
    if isinstance(tensor, Stored):
        yield tensor.key
    for part in tensor.parts:
        yield from stored_keys(part)


def _check_same(shapes: Sequence[tuple[int, ...]], what: str) -> None:
    if len(set(shapes)) != 1:
        raise ValueError(f"cannot {what} tensors of shapes {sorted(set(shapes))}")


def _check_same_dtype(parts: Sequence[LazyTensor], what: str) -> None:
    """A cast would be silent: the number that one part holds may not be one of the other's dtype."""
    first = parts[0]
    for other in parts:
        if other.dtype != first.dtype:
            both = f"{first.dtype}{_key_words(first)} and {other.dtype}{_key_words(other)}"
            raise ValueError(f"cannot {what} tensors of different types, {both}")


def _key_words(tensor: LazyTensor) -> str:
    key = next(stored_keys(tensor), None)
    if key:
        return f" ({key})"
    return ""


def _slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in region)


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _swapped(items: Sequence[Item], a: int, b: int) -> list[Item]:
    found = list(items)
    found[a], found[b] = found[b], found[a]
    return found
