"""Writes a torch distributed checkpoint tensor by tensor: no more than one is in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mindspeed_mm.checkpoint.conversion.files import Note, OutputFile
from mindspeed_mm.checkpoint.dcp_folder.reading import MODEL, DcpReader
from mindspeed_mm.checkpoint.dcp_folder.storage import disk_errors_told, plain_errors
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor

SECTION = f"{MODEL}."
_FILE = "__0_0.distcp"
"""What torch calls the first file of the first rank."""


@dataclass(frozen=True)
class DcpFolder(OutputFile):
    """`{"model": {name: tensor}}` as a distributed checkpoint, `.metadata` and one file of tensors."""

    content: Mapping[str, LazyTensor]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further name → the name that a tensor is stored under: one copy on the disk, read back under both."""

    @property
    def tensors(self) -> Mapping[str, LazyTensor]:
        """By the model's names, without aliases."""
        return self.content

    def write(self, path: Path, note: Note) -> None:
        """The tensors one after another, then the index, which has the aliases too."""
        writer = disk_errors_told(_AliasWriter(path, self.aliases))
        with plain_errors(path):
            dcp.save({}, storage_writer=writer, planner=_LazyPlanner(self.content, note), no_dist=True)

    @contextmanager
    def open_written(self, path: Path) -> Iterator[Mapping[str, LazyTensor]]:
        """By the index, each tensor once: aliases are left out."""
        stored = DcpReader(path).model_tensors()
        yield {name: tensor for name, tensor in stored.items() if name not in self.aliases}


class _LazyPlanner(DefaultSavePlanner):
    """Gives torch's writer a tensor when its turn comes: the writer asks for one after the other."""

    def __init__(self, tensors: Mapping[str, LazyTensor], note: Note) -> None:
        # One process: there is nothing that two ranks hold.
        super().__init__(dedup_save_to_lowest_rank=False)
        self._tensors, self._note = tensors, note

    def create_local_plan(self) -> SavePlan:
        items, paths = [], {}
        for name, tensor in self._tensors.items():
            key = f"{SECTION}{name}"
            items.append(_item(key, tensor))
            # As torch notes how the tree was flattened: readers find the section `model` by it.
            paths[key] = (MODEL, name)
        self.plan = SavePlan(items, planner_data=paths)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        name = write_item.index.fqn.removeprefix(SECTION)
        tensor = self._tensors[name].read()
        self._note(name, tensor)
        return tensor


def _item(key: str, tensor: LazyTensor) -> WriteItem:
    start, size = torch.Size([0] * len(tensor.shape)), torch.Size(tensor.shape)
    data = TensorWriteData(ChunkStorageMetadata(start, size), TensorProperties(dtype=tensor.dtype), size)
    return WriteItem(MetadataIndex(key, start), WriteItemType.TENSOR, tensor_data=data)


class _AliasWriter(FileSystemWriter):
    """Enters some tensors into the index under a second name."""

    def __init__(self, path: Path, aliases: Mapping[str, str]) -> None:
        super().__init__(path, sync_files=True)
        self._aliases = {f"{SECTION}{alias}": f"{SECTION}{name}" for alias, name in aliases.items()}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As torch's, which keeps every tensor of a file until the whole file is written."""
        written: Future[list[WriteResult]] = Future()
        results = []
        with self.fs.create_stream(self.fs.concat_path(self.path, _FILE), "wb") as stream:
            for item in plan.items:
                start = stream.tell()
                tensor = planner.resolve_data(item).detach()  # type: ignore[union-attr]
                if tensor.untyped_storage().size() != tensor.nbytes:
                    tensor = tensor.clone()  # the storage of a view would go into the file whole
                torch.save(tensor, stream)
                length = stream.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(_FILE, start, length)))
            stream.flush()
            os.fsync(stream.fileno())
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = {result.index.fqn: result for result in chain.from_iterable(results)}
        again = []
        for alias, key in self._aliases.items():
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[key]
            # The same place in the file, entered a second time.
            again.append(replace(written[key], index=replace(written[key].index, fqn=alias)))
            if isinstance(metadata.planner_data, dict):
                metadata.planner_data[alias] = (MODEL, alias.removeprefix(SECTION))
        super().finish(metadata, [*results, again])
