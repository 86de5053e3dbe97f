"""The ledger of a conversion: what of each stored tensor the output takes, counted before anything is read."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch

from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor, Region, Stored, TensorReader
from mindspeed_mm.core.errors import ModelFolderError, Problem

_SHOWN = 5


class CountedTensor(Stored):
    """A tensor of the source that counts what is read of it on the meta device.

    Args:
        key: Its key.
        base: Reads it.
    """

    def __init__(self, key: str, base: LazyTensor) -> None:
        super().__init__(key, base.shape, base.dtype, self._no_reader)
        self.base, self.elements_read = base, 0

    def _no_reader(self) -> TensorReader:
        raise NotImplementedError

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        if out.is_meta:
            self.elements_read += math.prod(length for _, length in region)
        else:
            self.base.copy_to(out, region)

    def read(self) -> torch.Tensor:  # noqa: D102
        if torch.get_default_device().type != "meta":
            return self.base.read()
        self.elements_read += math.prod(self.shape)
        return torch.empty(self.shape, dtype=self.dtype)


class SourceLedger:
    """Proves that a conversion takes every element of its sources, and none more often than it says.

    Args:
        sources: What is stored, by key.
        where: The source, for messages.
    """

    def __init__(self, sources: Mapping[str, LazyTensor], where: Path) -> None:
        self.where = where
        self.tensors = {key: CountedTensor(key, tensor) for key, tensor in sources.items()}
        """The same tensors, counted: build the output from these."""

    def check(self, made: Iterable[LazyTensor], repeated: Collection[str] = (), left_out: Collection[str] = ()) -> None:
        """Count what the output takes. Nothing is read.

        Args:
            made: Every tensor of the output.
            repeated: Keys that may be taken whole several times (a norm on every rank, a tied embedding).
            left_out: Keys that the output leaves out on purpose.

        Raises:
            ModelFolderError: Naming keys that are unused, used in part, or used more than once.
        """
        for tensor in self.tensors.values():
            tensor.elements_read = 0
        with torch.device("meta"):
            for item in made:
                item.read()
        problems: dict[str, list[Problem]] = {}
        for key, tensor in self.tensors.items():
            what = _complaint(tensor, key in repeated, key in left_out)
            if what is not None:
                problems.setdefault(what.partition(":")[0], []).append(Problem(what, key=key))
        if problems:
            shown = [problem for found in problems.values() for problem in _first(found)]
            raise ModelFolderError(f"{self.where}: the conversion does not fit what is stored here", problems=shown)


def _complaint(tensor: CountedTensor, may_repeat: bool, is_left_out: bool) -> str | None:
    taken, size = tensor.elements_read, math.prod(tensor.shape)
    if is_left_out:
        return "is left out, and used all the same" if taken else None
    if taken == 0 and size:
        return "is not used"
    if taken < size or (may_repeat and size and taken % size):
        return f"is used in part: {taken:,} of {size:,} elements"
    if taken > size and not may_repeat:
        return f"is used more than once: {taken:,} of {size:,} elements"
    return None


def _first(problems: list[Problem]) -> list[Problem]:
    more = len(problems) - _SHOWN
    return problems[:_SHOWN] + ([Problem(f"and {more:,} more")] if more > 0 else [])
