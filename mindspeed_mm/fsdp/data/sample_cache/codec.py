"""An encoded sample → bytes, and back to the very same sample.

A record is a short JSON text that says how the sample is built, and behind it the numbers. Whole numbers take as few
bytes as they need, labels are kept as the spans that are trained, pixels as the media plugin made them (bytes). Nothing
here can run code when it is read.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeGuard

import numpy as np
import torch

from mindspeed_mm.core.batch import IGNORED_LABEL
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.plugins.media_features import MediaFeatures

_HEAD = struct.Struct("<I")
_ALIGNMENT = 8
_NARROW = tuple(map(np.dtype, ("uint8", "uint16", "uint32")))
_DTYPES = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


class UnknownPart(TypeError):
    """A sample holds something that cannot be kept."""


def pack(sample: Mapping[str, object], place: str) -> bytes:
    """The record of a sample.

    Args:
        sample: An `EncodedSample`, an `EncodedPair`, or a plugin's dict of numbers, arrays, tensors, texts and lists.
        place: Where its row stands: left out of the record, for the same row may stand elsewhere tomorrow.

    Raises:
        UnknownPart: Naming the type that cannot be kept.
    """
    writer = _Writer(place)
    plan = json.dumps(writer.plan(sample), ensure_ascii=False, separators=(",", ":")).encode()
    return b"".join([_HEAD.pack(len(plan)), _aligned_content(_HEAD.size, plan), *writer.blocks])


def unpack(record: bytearray, place: str) -> dict[str, Any]:
    """The sample of a record. Arrays and tensors share the record's memory where their numbers stand as they were.

    Args:
        record: What `pack` gave, unchanged: whoever stores it checks that.
        place: Where the row stands now.
    """
    (size,) = _HEAD.unpack_from(record)
    plan = json.loads(record[_HEAD.size : _HEAD.size + size].decode())
    return _Reader(record, _aligned(_HEAD.size + size), place).build(plan)


Plan = Any
"""JSON: how to build a value. Not typed further: a list holds what the function that it names takes."""


class _Writer:
    """Turns values into a plan of JSON and blocks of numbers. A list of the plan that starts with a name of `_READ` is
    built by that function; every list of the sample is one of these."""

    def __init__(self, place: str) -> None:
        self._place = place
        self.blocks: list[bytes] = []
        self._end = 0

    def plan(self, value: object) -> Plan:
        """How to build a value."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, Mapping):
            return ["dict", {name: self._entry(value, name) for name in value}]
        if isinstance(value, tuple):
            return ["tuple", list(map(self.plan, value))]
        if isinstance(value, list):
            return ["list", list(map(self.plan, value))]
        if isinstance(value, np.ndarray) and value.dtype.name in _DTYPES:
            return ["array", *self._numbers(value)]
        if isinstance(value, torch.Tensor) and str(value.dtype).removeprefix("torch.") in _DTYPES:
            return ["tensor", *self._tensor(value)]
        if isinstance(value, MediaFeatures):
            return ["media", [self.plan(getattr(value, entry.name)) for entry in fields(value)]]
        raise UnknownPart(f"{type(value).__name__} in a sample cannot be kept")

    def _entry(self, owner: Mapping[str, object], name: str) -> Plan:
        value = owner[name]
        if not isinstance(name, str):
            raise UnknownPart(f"the key {name!r} of a sample cannot be kept")
        if name == "sample_id" and isinstance(value, str) and value.startswith(self._place):
            return ["place", value[len(self._place) :]]
        if name == "labels" and (spans := _trained_spans(owner.get("input_ids"), value)) is not None:
            return ["labels", *self._numbers(spans)]
        return self.plan(value)

    def _tensor(self, tensor: torch.Tensor) -> list[Plan]:
        tensor = tensor.detach().contiguous()
        if tensor.dtype == torch.bfloat16:  # unknown to numpy
            return ["bfloat16", list(tensor.shape), *self._stored(tensor.view(torch.int16).numpy())]
        return self._numbers(tensor.numpy())

    def _numbers(self, array: np.ndarray) -> list[Plan]:
        """Type, shape, and how the numbers are stored."""
        return [array.dtype.name, list(array.shape), *self._stored(array)]

    def _stored(self, array: np.ndarray) -> list[Plan]:
        """The type that is stored (none: one number stands for all) and where it starts, from the first block on."""
        if array.size > 1 and array.dtype == np.int64:
            low, high = int(array.min()), int(array.max())
            if low == high:
                return [None, low]
            array = array.astype(_narrowest(low, high), copy=False)
        start, content = self._end, _aligned_content(0, array.tobytes())
        self.blocks.append(content)
        self._end += len(content)
        return [array.dtype.name, start]


class _Reader:
    """Builds a sample from a record, by the plan that `_Writer` made."""

    def __init__(self, record: bytearray, start: int, place: str) -> None:
        self._record, self._start, self._place = record, start, place

    def build(self, plan: Plan) -> Any:
        """The value of a plan."""
        if type(plan) is list:
            return _READ[plan[0]](self, *plan[1:])
        return plan

    def dict_(self, entries: dict[str, Plan]) -> JsonObject:
        """Labels come after the token ids that they repeat, whichever stands first."""
        built: dict[str, Any] = dict.fromkeys(entries)  # keeps the order of the keys
        spans = {}
        for name, entry in entries.items():
            if type(entry) is list and entry[0] == "labels":
                spans[name] = self.array(*entry[1:])
            else:
                built[name] = self.build(entry)
        for name, found in spans.items():
            built[name] = _labels(built["input_ids"], found)
        return built

    def array(self, dtype: str, shape: list[int], stored: str | None, start: int) -> np.ndarray:
        """Numbers in the type that they had."""
        if stored is None:
            return np.full(shape, start, dtype=dtype)
        count = math.prod(shape)
        array = np.frombuffer(self._record, stored, count, self._start + start).reshape(shape)
        if stored == dtype:
            return array
        return array.astype(dtype)

    def tensor(self, dtype: str, shape: list[int], stored: str | None, start: int) -> torch.Tensor:
        """A tensor on the host."""
        if dtype == "bfloat16":
            return torch.from_numpy(self.array("int16", shape, stored, start)).view(torch.bfloat16)
        return torch.from_numpy(self.array(dtype, shape, stored, start))

    def list_(self, parts: list[Plan]) -> list[object]:
        return [self.build(part) for part in parts]

    def tuple_(self, parts: list[Plan]) -> tuple[object, ...]:
        return tuple(self.build(part) for part in parts)

    def media(self, parts: list[Plan]) -> MediaFeatures:
        """Build media features from the plans of their fields, in the order of declaration."""
        return MediaFeatures(*[self.build(part) for part in parts])

    def place(self, rest: str) -> str:
        """The sample's id: the row's place, and what followed it."""
        return self._place + rest


_READ: dict[str, Callable[..., object]] = {
    "dict": _Reader.dict_,
    "list": _Reader.list_,
    "tuple": _Reader.tuple_,
    "array": _Reader.array,
    "tensor": _Reader.tensor,
    "media": _Reader.media,
    "place": _Reader.place,
}


def _trained_spans(input_ids: object, labels: object) -> np.ndarray | None:
    """(2n,) first and end of each run of trained tokens; None where labels are something else."""
    if not (_is_row_of_tokens(input_ids) and _is_row_of_tokens(labels) and len(input_ids) == len(labels)):
        return None
    is_trained = labels != IGNORED_LABEL
    if not np.array_equal(labels[is_trained], input_ids[is_trained]):
        return None
    return np.flatnonzero(np.diff(is_trained.astype(np.int8), prepend=0, append=0)).astype(np.int64)


def _is_row_of_tokens(value: object) -> TypeGuard[np.ndarray]:
    return isinstance(value, np.ndarray) and value.dtype == np.int64 and value.ndim == 1


def _labels(input_ids: np.ndarray, spans: np.ndarray) -> np.ndarray:
    labels = np.full(len(input_ids), IGNORED_LABEL, dtype=np.int64)
    for first, end in spans.reshape(-1, 2).tolist():
        labels[first:end] = input_ids[first:end]
    return labels


def _narrowest(low: int, high: int) -> np.dtype[np.integer]:
    for dtype in _NARROW:
        if low >= 0 and high <= np.iinfo(dtype).max:
            return dtype
    return np.dtype(np.int64)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _aligned_content(before: int, content: bytes) -> bytes:
    return content + bytes(_aligned(before + len(content)) - before - len(content))
