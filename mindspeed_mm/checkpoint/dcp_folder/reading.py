"""Reads a torch distributed checkpoint as lazy tensors, in one process without a model or a process group."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterator
from itertools import product
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

from mindspeed_mm.checkpoint import layout
from mindspeed_mm.checkpoint.dcp_folder.metadata_unpickler import MetadataReader
from mindspeed_mm.checkpoint.dcp_folder.storage import read_chunk, read_tree
from mindspeed_mm.checkpoint.lazy_tensor import Region, Stored
from mindspeed_mm.core.errors import CheckpointError

MODEL = "model"
_OTHER_PREFIXES = ("optimizer.", "ema.", "extra_state.", "rng_state.", "lr_scheduler.")
"""What keys beside those of a model begin with."""
_KEPT = 2
_SHOWN = 40


class DcpReader:
    """The tensors of a distributed checkpoint by their full keys. The last ones read are kept: a map that cuts one into
    many asks for it again and again.

    Args:
        folder: Holds `.metadata`.

    Raises:
        CheckpointError: There is no index, or it is broken.
    """

    def __init__(self, folder: Path) -> None:
        self.storage = MetadataReader(folder)
        index = self.storage.metadata.state_dict_metadata
        self.entries = {key: entry for key, entry in index.items() if isinstance(entry, TensorStorageMetadata)}
        self.prefix = model_prefix(self.storage.metadata)
        """What stands before the names of the model's tensors: `model.`, or nothing in a bare state dict."""
        self._kept: OrderedDict[str | tuple[str, torch.Size], torch.Tensor] = OrderedDict()

    def lazy(self, key: str) -> Stored:
        """A tensor by its full key, not read yet."""
        return _ChunkedTensor(key, self.entries[key], self)

    def model_tensors(self) -> dict[str, Stored]:
        """The model's tensors by name."""
        keys = [key for key in self.entries if key.startswith(self.prefix)]
        if self.prefix:
            keys = [key for key in keys if not key.startswith(_OTHER_PREFIXES)]
        return {key.removeprefix(self.prefix): self.lazy(key) for key in keys}

    def get_tensor(self, key: str) -> torch.Tensor:
        """One whole tensor in host memory, in the dtype that it was saved in."""
        if self._recall(key) is None:
            entry = self.entries[key]
            tensor = self._kept[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
            read_tree({key: tensor}, self.storage)
        return self._kept[key]

    def get_chunk(self, key: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        """One stored chunk of a tensor in host memory, as `get_tensor`."""
        place = key, chunk.offsets
        if self._recall(place) is None:
            self._kept[place] = read_chunk(self.storage, key, chunk, self.entries[key].properties.dtype)
        return self._kept[place]

    def _recall(self, place: str | tuple[str, torch.Size]) -> torch.Tensor | None:
        """What is kept, now the last; else None, and room for one more."""
        if place in self._kept:
            self._kept.move_to_end(place)
            return self._kept[place]
        while len(self._kept) >= _KEPT:
            self._kept.popitem(last=False)
        return None


class _ChunkedTensor(Stored):
    """A tensor of which no more is read than the chunks that hold what is asked for: all layers of a model may be
    stacked in one.

    Args:
        key: Its key.
        entry: In the index.
        reader: Of the checkpoint.
    """

    def __init__(self, key: str, entry: TensorStorageMetadata, reader: DcpReader) -> None:
        super().__init__(key, entry.size, entry.properties.dtype, lambda: reader)
        chunks = [chunk for chunk in entry.chunks if 0 not in chunk.sizes]
        self._reader_of_chunks = reader
        self._chunks = {tuple(chunk.offsets): chunk for chunk in chunks}
        self._starts: list[list[int]] = []
        self._longest: list[int] = []
        for dim in range(len(self.shape)):
            self._starts.append(sorted({chunk.offsets[dim] for chunk in chunks}))
            self._longest.append(max((chunk.sizes[dim] for chunk in chunks), default=0))

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        if len(self._chunks) < 2:
            super()._copy_to(out, region)
            return
        for chunk in self._overlapping(region):
            source, target = self._reader_of_chunks.get_chunk(self.key, chunk), out
            for dim, (start, length) in enumerate(region):
                offset, size = chunk.offsets[dim], chunk.sizes[dim]
                first, last = max(start, offset), min(start + length, offset + size)
                source = source.narrow(dim, first - offset, last - first)
                target = target.narrow(dim, first - start, last - first)
            target.copy_(source if out.device == source.device else source.to(out.device))

    def _overlapping(self, region: Region) -> Iterator[ChunkStorageMetadata]:
        # Of each dim, the starts near enough to reach the region with the longest chunk; not all of them do.
        near = []
        for (start, length), starts, longest in zip(region, self._starts, self._longest, strict=True):
            near.append(starts[bisect_right(starts, start - longest) : bisect_left(starts, start + length)])
        for offsets in product(*near):
            chunk = self._chunks.get(offsets)
            if chunk is None:  # starts of different chunks, at which none starts in every dim
                continue
            ends = (offset + size for offset, size in zip(offsets, chunk.sizes, strict=True))
            if all(end > start for end, (start, _) in zip(ends, region, strict=True)):
                yield chunk


def model_prefix(metadata: Metadata) -> str:
    """`model.` where the checkpoint is a tree with a section of that name, nothing where it is a bare state dict.

    The index says how keys were made of a tree; where it does not, a section is one when nothing lies outside of it
    and those that stand beside a model.
    """
    prefix = f"{MODEL}."
    paths = metadata.planner_data
    if isinstance(paths, dict) and paths:
        for path in paths.values():
            if isinstance(path, tuple) and len(path) > 1 and path[0] == MODEL:
                return prefix
        return ""
    entries = metadata.state_dict_metadata.items()
    tensors = [key for key, entry in entries if isinstance(entry, TensorStorageMetadata)]
    is_tree = bool(tensors) and all(key.startswith((prefix, *_OTHER_PREFIXES)) for key in tensors)
    return prefix if is_tree else ""


def wrapper_prefix(names: Collection[str], wanted: Collection[str]) -> str:
    """`model.` where a checkpoint was saved from a model inside another module of that name, so that every name of the
    model has it in front; else nothing."""
    known = set(names)
    plain = sum(name in known for name in wanted)
    wrapped = sum(f"{MODEL}.{name}" in known for name in wanted)
    return f"{MODEL}." if wrapped > plain else ""


def find_step(folder: Path) -> Path:
    """The folder that holds `.metadata`: the one given, or the step in it that the tracker names, or the newest.

    Raises:
        CheckpointError: There is none, or the tracker names something else.
    """
    if (folder / layout.METADATA).is_file():
        return folder
    named = layout.read_tracker(folder)
    if named is None and (said := _tracker_text(folder)):
        raise CheckpointError(
            f"names {said[:_SHOWN]!r}, which is not a step",
            where=str(folder / layout.TRACKER),
            way_out=f"Name the folder with {layout.METADATA} itself, or write '{layout.RELEASE}' or a step's number.",
        )
    steps = [layout.checkpoint_folder(folder, number) for number in reversed(layout.list_iterations(folder))]
    if named is not None:
        named_step = folder / named if named == layout.RELEASE else layout.checkpoint_folder(folder, int(named))
        steps.insert(0, named_step)
    steps.append(folder / layout.RELEASE)
    for step in steps:
        if (step / layout.METADATA).is_file():
            return step
    raise CheckpointError(
        "holds no distributed checkpoint",
        where=str(folder),
        way_out=f"Name the folder with {layout.TRACKER}, its {layout.RELEASE}/ or an iter_*/.",
    )


def _tracker_text(folder: Path) -> str:
    """What the tracker holds, whether or not it is a step; nothing where there is none."""
    tracker = folder / layout.TRACKER
    return tracker.read_text(errors="replace").strip() if tracker.is_file() else ""
