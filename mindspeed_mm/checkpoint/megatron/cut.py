"""How tensor parallelism divides one tensor among its ranks, and how the pieces become the tensor again.

A tensor is seen as `parts` equal parts along one dim (gate and up of a gated projection are two, a fused [Q|K|V] is
three), and each rank holds its run of every part. Where whole units must stay together (attention heads, groups of a
key with its queries), the run is a number of units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_mm.checkpoint.lazy_tensor import Concatenated, LazyTensor, Padded, Sliced


@dataclass(frozen=True)
class TensorCut:
    """A dim that tensor parallelism divides."""

    dim: int
    parts: int = 1
    """Equal parts along the dim, each of which is divided for itself."""
    units: int | None = None
    """Units in each part that may not be torn; None: single rows."""
    uneven: bool = False
    """The first ranks may hold one unit more, where the number of ranks does not divide that of the units."""
    padded: bool = False
    """Of a vocabulary: the dim may be filled up with zeros, so that the ranks divide it evenly."""

    def piece(self, tensor: LazyTensor, rank: int, ranks: int, multiple: int = 1) -> LazyTensor:
        """What one rank holds.

        Args:
            tensor: The whole.
            rank: Which one, from 0.
            ranks: How many divide the tensor.
            multiple: Of a padded dim: its length becomes a multiple of this times `ranks`.

        Raises:
            ValueError: The ranks do not divide the units.
        """
        if self.padded:
            tensor = pad(tensor, self.dim, multiple * ranks)
        length = tensor.shape[self.dim]
        each, rest = divmod(length, self.parts)
        if rest:
            raise ValueError(f"{length} rows cannot be divided into {self.parts} equal parts")
        starts = self._starts(each, ranks)
        start, run = starts[rank], starts[rank + 1] - starts[rank]
        runs = [Sliced(tensor, self.dim, part * each + start, run) for part in range(self.parts)]
        return _end_to_end(runs, self.dim)

    def whole(self, pieces: Sequence[LazyTensor], true_length: int | None = None) -> LazyTensor:
        """The tensor again.

        Args:
            pieces: Those of all ranks, in order.
            true_length: Of a padded dim, before it was filled up; None: nothing was.

        Raises:
            ValueError: A piece is no `parts` equal parts, or the pieces are shorter than `true_length`.
        """
        in_order = []
        for part in range(self.parts):
            for piece in pieces:
                length, rest = divmod(piece.shape[self.dim], self.parts)
                if rest:
                    rows = piece.shape[self.dim]
                    raise ValueError(f"{rows} rows cannot be divided into {self.parts} equal parts")
                if self.parts > 1:
                    piece = Sliced(piece, self.dim, part * length, length)
                in_order.append(piece)
        tensor = _end_to_end(in_order, self.dim)
        if not self.padded or true_length is None or tensor.shape[self.dim] == true_length:
            return tensor
        if tensor.shape[self.dim] < true_length:
            raise ValueError(f"{tensor.shape[self.dim]} rows are fewer than the vocabulary's {true_length}")
        return Sliced(tensor, self.dim, 0, true_length)

    def _starts(self, length: int, ranks: int) -> list[int]:
        """Where each rank's run begins in a part of this length, and at last where it ends."""
        units = self.units or length
        if length % units:
            raise ValueError(f"{length} rows cannot be divided into {units} equal units")
        each, more = divmod(units, ranks)
        if more and not self.uneven:
            what = "heads or groups" if self.units else "rows"
            raise ValueError(f"{ranks} ranks do not divide {units} {what}")
        # The first `more` ranks hold a unit more than the others.
        rows_of_unit = length // units
        starts = []
        for rank in range(ranks + 1):
            units_before = each * rank + min(rank, more)
            starts.append(units_before * rows_of_unit)
        return starts


def _end_to_end(runs: Sequence[LazyTensor], dim: int) -> LazyTensor:
    if len(runs) == 1:
        return runs[0]
    return Concatenated(runs, dim)


def pad(tensor: LazyTensor, dim: int, multiple: int) -> LazyTensor:
    """The tensor with zeros behind it, so that `dim` is a multiple of `multiple`."""
    length = -(-tensor.shape[dim] // multiple) * multiple
    return tensor if length == tensor.shape[dim] else Padded(tensor, dim, length)
