"""The ledger of a conversion: which elements of each stored tensor the output takes, and which of its own each written
tensor gets, found out before anything is read.

Every expression is run once on tensors without memory. What is read of a source and what is written into a target are
boxes then, and each element is used, and written, exactly once when boxes do not overlap and fill the tensor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mindspeed_mm.checkpoint.dcp_folder.index_check import Interval, have_overlap
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor, Region, Stored, TensorReader, whole
from mindspeed_mm.core.errors import ModelFolderError, Problem, first_problems


class CountedTensor(Stored):
    """A tensor of the source that notes what is read of it on the meta device.

    Args:
        key: Its key.
        base: Reads it.
    """

    def __init__(self, key: str, base: LazyTensor) -> None:
        super().__init__(key, base.shape, base.dtype, self._no_reader)
        self.base = base
        self.taken: Counter[Region] = Counter()

    def take(self) -> Counter[Region]:
        """What was noted since the last time."""
        taken, self.taken = self.taken, Counter()
        return taken

    def _no_reader(self) -> TensorReader:
        raise NotImplementedError

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        if out.is_meta:
            self.taken[tuple(region)] += 1
            out.zero_()
        else:
            self.base.copy_to(out, region)

    def read(self) -> torch.Tensor:
        """The base's values; on the meta device none, and the whole of it is counted as used."""
        if torch.get_default_device().type != "meta":
            return self.base.read()
        self.taken[whole(self.shape)] += 1
        return torch.empty(self.shape, dtype=self.dtype)


class SourceLedger:
    """What a conversion takes of its source.

    Args:
        sources: What is stored, by key.
        where: The source, for messages.
        beside: What else the source holds and nobody writes, such as the states of an optimizer → why.
    """

    def __init__(
        self, sources: Mapping[str, LazyTensor], where: Path, beside: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.where, self.beside = where, beside
        self.tensors = {key: CountedTensor(key, tensor) for key, tensor in sources.items()}
        """The same tensors, counted: build the output from these."""


def check_ledgers(
    ledgers: Sequence[SourceLedger],
    made: Iterable[tuple[str, LazyTensor]],
    *,
    times: Mapping[str, int | None] | None = None,
    left_out: Collection[str] = (),
    dropped: Iterable[LazyTensor] = (),
) -> None:
    """Prove that every element of the sources is used, and every element of the output written, exactly once; nothing
    is read.

    Args:
        ledgers: Of all sources.
        made: Every tensor of the output, with its key.
        times: Source keys that are used whole several times (a norm on every rank, a tied embedding) → how often; None:
            as often as it takes.
        left_out: Source keys that are not used, on purpose.
        dropped: Made of parts of the sources that are not used, by a rule: rows that fill a vocabulary up, say.

    Raises:
        ModelFolderError: Naming keys that are unused, used in part or more often, or not written so.
    """
    counted: list[CountedTensor] = []
    for ledger in ledgers:
        counted += ledger.tensors.values()
    for tensor in counted:
        tensor.take()  # whatever was read before is not of this conversion
    made = list(made)
    _check_counted(counted, made)
    told: dict[str, list[Problem]] = {}
    with torch.device("meta"), _Writes() as writes:
        for key, item in made:
            _note(told, key, _fault("written", writes.of(item), math.prod(item.shape)))
        # Taken before the dropped parts are read, which are counted apart below.
        used = {id(tensor): tensor.take() for tensor in counted}
        for item in dropped:
            item.read()
    _raise("the conversion does not write every tensor whole", told)
    times = times or {}
    for ledger in ledgers:
        told = {}
        for key, tensor in ledger.tensors.items():
            boxes, as_often = used[id(tensor)], times.get(key, 1)
            if key in left_out:
                _note(told, key, "is left out, and used all the same" if boxes else None)
            else:
                boxes += Counter(dict.fromkeys(tensor.take(), as_often or 1))
                fault = _fault("used", boxes, math.prod(tensor.shape), as_often)
                _note(told, key, fault, _way_out(boxes, fault))
        headline = f"{ledger.where}: the conversion does not fit what is stored here"
        if _UNUSED in told:
            headline += f". {_FOR_UNUSED}"
        _raise(headline, told)


def _check_counted(counted: Iterable[CountedTensor], made: Iterable[tuple[str, LazyTensor]]) -> None:
    """Refuse an output that is built of the source's own tensors instead of the ledger's, which alone are counted."""
    bases = {id(tensor.base): tensor.key for tensor in counted}
    told: dict[str, list[Problem]] = {}
    for _, item in made:
        parts = [item]
        while parts:
            part = parts.pop()
            parts += part.parts
            if id(part) in bases:
                _note(told, bases[id(part)], "is read past the ledger")
    _raise("the output is not built of what is counted. Build it of `ledger.tensors`", told)


_UNUSED = "is not used"
_FOR_UNUSED = (
    "What is not used needs a rule in the converter; if it is not to be written, name it in `left_out` of Conversion, "
    "with the reason."
)


class _Writes(TorchFunctionMode):
    """Notes which boxes of a tensor are written."""

    def __init__(self) -> None:
        super().__init__()
        self._target = torch.empty(0)
        self._boxes: Counter[Region] = Counter()

    def of(self, item: LazyTensor) -> Counter[Region]:
        """The boxes that an expression fills."""
        self._target, self._boxes = torch.empty(item.shape, dtype=item.dtype), Counter()
        self._storage = self._target.untyped_storage()._cdata
        item.copy_to(self._target, whole(item.shape))
        return self._boxes

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _WRITING and args[0].untyped_storage()._cdata == self._storage:
            self._boxes[_place(args[0], self._target)] += 1
        return func(*args, **(kwargs or {}))


_WRITING = {torch.Tensor.copy_, torch.Tensor.zero_}


def _place(view: torch.Tensor, target: torch.Tensor) -> Region:
    """Which box of a contiguous tensor a view of it is: slices, selections and transposes of it are boxes."""
    # A dim of the view is known by its stride, whatever the order of dims; one of length 1 may have any stride.
    lengths = {stride: length for length, stride in zip(view.shape, view.stride(), strict=True) if length != 1}
    offset, box = view.storage_offset(), []
    for length, stride in zip(target.shape, target.stride(), strict=True):
        if length > 1:
            start, offset = divmod(offset, stride)  # the digits of the offset, the longest stride first
            box.append((start, lengths.get(stride, 1)))
        else:
            box.append((0, length))
    return tuple(box)


def _fault(what: str, boxes: Counter[Region], size: int, times: int | None = 1) -> str | None:
    """What is wrong with the boxes of a tensor: they have to fill `size` elements without overlap, each `times`."""
    filled: list[list[Interval]] = []
    other_times: list[int] = []
    held = total = 0
    for region, n in boxes.items():
        elements = math.prod(length for _, length in region)
        held += elements
        total += elements * n
        if elements:
            filled.append(_ends(region))
            if times is not None and n != times:
                other_times.append(n)
    if size and not held:
        return f"is not {what}"
    if other_times and times != 1:
        return f"is {what} {other_times[0]} times, and {times} are expected"
    if other_times or held > size or have_overlap(filled):
        return f"is {what} more than once: {total:,} of {size:,} elements"
    if held < size:
        return f"is {what} in part: {held:,} of {size:,} elements"
    return None


def _ends(box: Region) -> list[Interval]:
    return [(start, start + length) for start, length in box]


def _note(told: dict[str, list[Problem]], key: str, what: str | None, way_out: str = "") -> None:
    if what is not None:
        told.setdefault(what.partition(":")[0], []).append(Problem(what, key=key, way_out=way_out))


def _way_out(boxes: Mapping[Region, int], what: str | None) -> str:
    """Of a tensor that is used several times: how to say that it is meant, where it is used whole each time."""
    uses = set(boxes.values())
    if what is None or not what.startswith("is used more than once") or uses == {1} or len(uses) != 1:
        return ""
    return (
        f"If that is meant (a tied tensor, written {uses.pop()} times), name it in `times` of Conversion. `Computed` "
        "reads its parts whole for each piece that is cut of it: apply the key map before it."
    )


def _raise(headline: str, told: Mapping[str, list[Problem]]) -> None:
    if told:
        raise ModelFolderError(headline, problems=list(chain.from_iterable(map(first_problems, told.values()))))
