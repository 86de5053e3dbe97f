"""Checks what a distributed checkpoint's index says, so that nothing but what was saved is ever taken for weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from mindspeed_mm.core.errors import CheckpointError

Interval = tuple[int, int]


def checked_index(found: object, path: Path) -> Metadata:
    """An index whose data lies in the checkpoint's own folder and is the whole of every tensor.

    Args:
        found: What the file holds.
        path: The file, for the message.

    Raises:
        CheckpointError: It is no index, points outside the folder, or a tensor's chunks leave a hole or overlap.
    """
    if not isinstance(found, Metadata):
        raise CheckpointError(f"holds a {type(found).__name__}, not the index of a checkpoint", where=str(path))
    for name, table in (("tensors", found.state_dict_metadata), ("places", found.storage_data)):
        if not isinstance(table, dict):
            what = f"holds a {type(table).__name__} where its table of {name} should be"
            raise CheckpointError(what, where=str(path))
    for place in {info.relative_path for info in found.storage_data.values()}:
        # A plain name in the same folder: ".." is one to `Path.name`.
        if place == ".." or Path(place).name != place:
            raise CheckpointError(f"points to '{place}', outside the checkpoint", where=str(path))
    for key, entry in found.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            _check_tensor(key, entry, found.storage_data, path)
        elif not isinstance(entry, BytesStorageMetadata):
            what = f"is entered as a {type(entry).__name__}, not as a tensor"
            raise CheckpointError(what, where=str(path), key=str(key))
    return found


def _check_tensor(key: str, entry: TensorStorageMetadata, places: Collection[MetadataIndex], path: Path) -> None:
    what = None
    if not _is_size(entry.size) or not isinstance(entry.properties.dtype, torch.dtype):
        what = f"is entered with size {entry.size} and type {entry.properties.dtype}"
    elif any(not _lies_within(chunk, entry.size) for chunk in entry.chunks):
        what = f"has a chunk that lies outside its size, {list(entry.size)}"
    else:
        chunks = filled_chunks(entry)
        wanted = math.prod(entry.size)
        # Without overlap and inside the size, as many numbers as the whole has are the whole.
        held = sum(math.prod(chunk.sizes) for chunk in chunks)
        if have_overlap(list(map(_box, chunks))):
            what = "has chunks that overlap"
        elif held != wanted:
            what = f"is {list(entry.size)}, {wanted:,} numbers, and its chunks hold {held:,} of them"
        elif any(MetadataIndex(key, chunk.offsets) not in places for chunk in chunks):
            what = "has a chunk that is in no file"
    if what is not None:
        way_out = "Restore the checkpoint from a copy, or name an older one."
        raise CheckpointError(what, where=str(path), key=key, way_out=way_out)


def filled_chunks(entry: TensorStorageMetadata) -> list[ChunkStorageMetadata]:
    """Those that hold something: a rank that has no part of a tensor saves an empty chunk."""
    return [chunk for chunk in entry.chunks if 0 not in chunk.sizes]


def have_overlap(boxes: Sequence[Sequence[Interval]]) -> bool:
    """Whether two boxes of as many dimensions, each one's intervals `(start, end)`, have an element in common."""
    if len(boxes) < 2:
        return False
    dims = range(len(boxes[0]))
    # Along the dimension that divides them most, few boxes stand beside one another.
    along = max(dims, key=lambda dim: len({box[dim] for box in boxes}), default=None)
    if along is None:
        return True  # two chunks of one number
    # A sweep along it: only boxes that have not ended yet can overlap the next one.
    beside: list[Sequence[Interval]] = []
    for box in sorted(boxes, key=lambda box: box[along]):
        beside = [other for other in beside if other[along][1] > box[along][0]]
        for other in beside:
            if all(_meet(box[dim], other[dim]) for dim in dims):
                return True
        beside.append(box)
    return False


def _meet(one: Interval, other: Interval) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _box(chunk: ChunkStorageMetadata) -> list[Interval]:
    return [(start, start + length) for start, length in zip(chunk.offsets, chunk.sizes, strict=True)]


def _is_size(size: object) -> bool:
    return isinstance(size, tuple) and all(type(length) is int and length >= 0 for length in size)


def _lies_within(chunk: ChunkStorageMetadata, size: Sequence[int]) -> bool:
    if not (_is_size(chunk.offsets) and _is_size(chunk.sizes) and len(chunk.offsets) == len(chunk.sizes) == len(size)):
        return False
    return all(end <= length for (_, end), length in zip(_box(chunk), size, strict=True))
