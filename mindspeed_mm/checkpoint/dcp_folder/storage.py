"""Writes and reads a tree of tensors as a torch distributed checkpoint; errors name the file and the reason."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, WriteItem
from torch.utils.serialization import config

from mindspeed_mm.checkpoint.dcp_folder.metadata_unpickler import BROKEN, MetadataReader
from mindspeed_mm.checkpoint.pt_files import os_errors_told
from mindspeed_mm.core.errors import CheckpointError, MMError
from mindspeed_mm.core.hashed_file import FileRecord, HashedFile
from mindspeed_mm.fsdp.utils.ranks import Ranks

Writer = TypeVar("Writer", bound=FileSystemWriter)

Tree = dict[str, dict[str, torch.Tensor]]
"""`{"model": {name: tensor}, "optimizer": {"state.<name>.<key>": tensor}, "ema": {name: tensor}}`, the last with
`training.ema` only. Tensors only: anything else would be stored as a pickle."""

_SMALL_BYTES = 1 << 16
"""Most bytes of a tensor that is put together in memory before it is written."""


class _TruthfulFileSystem(FileSystem):
    """Raises the operating system's error."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[object]:
        with os_errors_told(Path(path)), super().create_stream(path, mode) as stream:
            yield stream


class _HashingFileSystem(FileSystem):
    """As that, and hashes what is written."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}
        """By the names of the files, of those that are complete."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[object]:
        with os_errors_told(Path(path)), HashedFile(Path(path)) as stream:
            yield stream
        self.records[Path(path).name] = stream.record

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        # torch writes `.metadata` under another name first.
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _InOnePiece(io.BytesIO):
    """What `torch.save` writes of a small tensor, in forty pieces; it goes into the file when it is closed."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file

    def close(self) -> None:
        """Write it, once; not into a file that an error has closed."""
        if not (self.closed or self._file.closed):
            self._file.write(self.getvalue())
        super().close()


class _SmallInOnePiece:
    """Stands for `FileSystemWriter.transforms`, which makes a class for every tensor and hands each piece on by itself,
    through two calls of Python: half the time of saving small tensors.

    Args:
        others: The writer's own, for tensors that are not small: they are not copied.
    """

    def __init__(self, others: Any) -> None:
        self._others = others

    def transform_save_stream(self, item: WriteItem, file: IO[bytes]) -> tuple[IO[bytes], list[str]]:
        """What an item is written into, and how it is changed on the way: not at all."""
        data = item.tensor_data
        if data is None or math.prod(data.chunk.sizes) * data.properties.dtype.itemsize > _SMALL_BYTES:
            made: tuple[IO[bytes], list[str]] = self._others.transform_save_stream(item, file)
            return made
        return _InOnePiece(file), []


class _NamingFileSystem(FileSystem):
    """Names the file whose content torch cannot read. Its own words name none, and advise to let the file run code."""

    @contextmanager
    def create_stream(self, path: object, mode: str) -> Iterator[object]:
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except BROKEN as error:
            raise CheckpointError(
                _damage_words(error),
                where=str(path),
                way_out="Restore the checkpoint from a copy, or name an older one in training.load.",
            ) from error


def _damage_words(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}"
    if "weights_only" in str(error):  # torch's advice is to turn that off, and so to let the file run code
        return "is refused: it is damaged, or holds more than tensors"
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"is damaged: {type(error).__name__}: {text}"


def write_tree(tree: Tree, folder: Path, ranks: Ranks) -> dict[str, FileRecord]:
    """Write this rank's shards of `tree`, forced to the disk. Called by all ranks.

    Returns:
        What this rank has written, by the names of the files. Nothing is read back.

    Raises:
        OSError: A file could not be written, on whichever rank.
        CheckpointError: Anything else went wrong.
    """
    writer = FileSystemWriter(folder, sync_files=False)  # ours are forced to the disk when they are closed
    writer.fs = files = _HashingFileSystem()
    writer.transforms = _SmallInOnePiece(writer.transforms)  # type: ignore[assignment]
    with plain_errors(folder), config.patch("save.compute_crc32", False):  # five times as slow as our own hash
        dcp.save(tree, storage_writer=writer, process_group=ranks.group, no_dist=ranks.group is None)
    return files.records


def read_tree(tree: Mapping[str, object], reader: MetadataReader, ranks: Ranks | None = None) -> None:
    """Fill the tensors of `tree` in place, each rank reading what its shards need.

    Args:
        tree: Allocated tensors under the checkpoint's keys, nested or not; sharded ones are filled shard by shard.
        reader: The checkpoint.
        ranks: All of them; None reads in this process alone.

    Raises:
        CheckpointError: A file is missing or broken.
    """
    group = ranks.group if ranks else None
    reader.fs = _NamingFileSystem()
    with plain_errors(Path(reader.path)):
        dcp.load(tree, storage_reader=reader, process_group=group, no_dist=group is None)


def read_chunk(reader: MetadataReader, key: str, chunk: ChunkStorageMetadata, dtype: torch.dtype) -> torch.Tensor:
    """One stored chunk of a tensor, in host memory.

    Args:
        reader: The checkpoint.
        key: The tensor's.
        chunk: Of the tensor's entry in the index.
        dtype: Of the tensor.

    Raises:
        CheckpointError: The file is missing or broken.
    """
    place = MetadataIndex(key, chunk.offsets)
    start = torch.Size([0] * len(chunk.sizes))
    # By hand: torch's planner asks for the whole tensor to fill.
    item = ReadItem(LoadItemType.TENSOR, place, start, place, start, chunk.sizes)
    held = torch.empty(chunk.sizes, dtype=dtype)
    reader.fs = _NamingFileSystem()
    reader.read_data(LoadPlan([item]), _Into(held))  # type: ignore[arg-type]
    return held


class _Into:
    """The part of a planner that a reader of tensors asks."""

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        return self.held

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None: ...


def disk_errors_told(writer: Writer) -> Writer:
    """torch's writer of files, changed to raise the operating system's own errors."""
    writer.fs = _TruthfulFileSystem()
    return writer


@contextmanager
def plain_errors(folder: Path) -> Iterator[None]:
    """torch's exception is a traceback; what happened stands in the failures that it carries. Its warning that there is
    no process group is left out."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        # Of the first rank: the others mostly failed for the same reason.
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, MMError):
            raise cause from error
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror, cause.filename) from error
        text = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise CheckpointError(f"rank {rank}: {type(cause).__name__}: {text}", where=str(folder)) from error
