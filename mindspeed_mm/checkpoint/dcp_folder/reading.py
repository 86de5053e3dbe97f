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
from mindspeed_mm.checkpoint.dcp_folder.index_check import filled_chunks
from mindspeed_mm.checkpoint.dcp_folder.metadata_unpickler import MetadataReader
from mindspeed_mm.checkpoint.dcp_folder.storage import read_chunk, read_tree
from mindspeed_mm.checkpoint.lazy_tensor import Region, Stored
from mindspeed_mm.checkpoint.recognise import check_folder_exists
from mindspeed_mm.core.errors import CheckpointError
from mindspeed_mm.core.json_file import read_json_object

MODEL = "model"
_OTHER_PREFIXES = ("optimizer.", "ema.", "critic.", "critic_optimizer.", "extra_state.", "rng_state.", "lr_scheduler.")
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
        tensors: dict[str, Stored] = {}
        for key in self.entries:
            is_other = bool(self.prefix) and key.startswith(_OTHER_PREFIXES)
            if key.startswith(self.prefix) and not is_other:
                tensors[key.removeprefix(self.prefix)] = self.lazy(key)
        return tensors

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
        chunks = filled_chunks(entry)
        self._reader_of_chunks = reader
        self._chunks = {tuple(chunk.offsets): chunk for chunk in chunks}
        self._starts: list[list[int]] = []
        self._longest: list[int] = []
        for dim in range(len(self.shape)):
            self._starts.append(sorted({chunk.offsets[dim] for chunk in chunks}))
            self._longest.append(max((chunk.sizes[dim] for chunk in chunks), default=0))

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        # A lone chunk is the whole tensor, which the reader keeps for the next part that is asked for.
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
            if out.device != source.device:
                source = source.to(out.device)
            target.copy_(source)

    def _overlapping(self, region: Region) -> Iterator[ChunkStorageMetadata]:
        # Of each dim, the starts near enough to reach the region with the longest chunk; not all of them do.
        near = []
        for (start, length), starts, longest in zip(region, self._starts, self._longest, strict=True):
            near.append(starts[bisect_right(starts, start - longest) : bisect_left(starts, start + length)])
        for offsets in product(*near):
            chunk = self._chunks.get(offsets)
            # Starts of different chunks need not be, in every dim, those of one.
            if chunk is not None and _reaches(chunk, region):
                yield chunk


def _reaches(chunk: ChunkStorageMetadata, region: Region) -> bool:
    """Whether a chunk ends behind the start of a region in every dim."""
    for offset, size, (start, _) in zip(chunk.offsets, chunk.sizes, region, strict=True):
        if offset + size <= start:
            return False
    return True


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
    found = ""
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        if not key.startswith((prefix, *_OTHER_PREFIXES)):
            return ""
        found = prefix
    return found


def wrapper_prefix(names: Collection[str], wanted: Collection[str]) -> str:
    """`model.` where a checkpoint was saved from a model inside another module of that name, so that every name of the
    model has it in front; else nothing."""
    known = set(names)
    plain = wrapped = 0
    for name in wanted:
        plain += name in known
        wrapped += f"{MODEL}.{name}" in known
    if wrapped > plain:
        return f"{MODEL}."
    return ""


def step_in(folder: Path) -> Path | None:
    """As `find_step`; None where the folder holds no distributed checkpoint."""
    try:
        return find_step(folder)
    except CheckpointError:
        return None


def find_step(folder: Path) -> Path:
    """The folder that holds `.metadata`: the one given, or the step in it that the tracker names, or the newest.

    Raises:
        CheckpointError: There is none, or the tracker names something else.
    """
    check_folder_exists(folder)
    if (folder / layout.METADATA).is_file():
        return folder
    named = layout.read_tracker(folder)
    if named is None and (said := layout.tracker_text(folder)):
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


def model_noted_in(step: Path) -> Path | None:
    """The model folder that the manifest of a run's checkpoint names, if it is there.

    Raises:
        CheckpointError: The manifest is broken.
    """
    file = step / layout.MANIFEST
    content: object = read_json_object(file, CheckpointError) if file.is_file() else {}
    for key in ("context", "config", "model", "model_name_or_path"):
        content = content.get(key) if isinstance(content, dict) else None
    if isinstance(content, str) and Path(content).is_dir():
        return Path(content)
    return None
