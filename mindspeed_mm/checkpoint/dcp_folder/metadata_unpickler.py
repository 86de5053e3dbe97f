"""Reads the `.metadata` file of a torch distributed checkpoint, which is a pickle, without letting it run anything.

Only the listed classes can be built; they hold plain data. Whatever else a file asks for is refused by name before it
is looked up.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from mindspeed_mm.checkpoint.dcp_folder.index_check import checked_index
from mindspeed_mm.checkpoint.layout import METADATA
from mindspeed_mm.core.errors import CheckpointError

_CHECKPOINT_CLASSES = {
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
}
_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_ALLOWED: Mapping[str, Collection[str]] = {
    "torch.distributed.checkpoint.metadata": _CHECKPOINT_CLASSES,
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    # Megatron-Core keeps in its index how it was planned.
    "torch.distributed.checkpoint.planner": {
        "SavePlan",
        "WriteItem",
        "WriteItemType",
        "TensorWriteData",
        "BytesIOWriteData",
    },
    "torch": {*_DTYPES, "Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}
"""Module → what of it an index may name."""

BROKEN: tuple[type[Exception], ...] = (
    *(pickle.UnpicklingError, OSError, EOFError, ValueError, TypeError, AttributeError, LookupError, ImportError),
    *(OverflowError, MemoryError, RecursionError, RuntimeError, AssertionError),
)
"""What damaged bytes make an unpickler, or torch's reader of tensors, raise."""


class _Refused(Exception):
    """The file asks for something that no checkpoint needs."""


class _MegatronIndex(Metadata):
    """What Megatron-Core before 0.16 calls its index: torch's with a note on optimizers' tensors."""


_OWN_OF_MEGATRON = {"MCoreMetadata": _MegatronIndex, "MCoreSavePlan": SavePlan}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if module == "megatron.core.dist_checkpointing.strategies.torch" and name in _OWN_OF_MEGATRON:
            # Ours stand for Megatron's classes, which need not be installed.
            return _OWN_OF_MEGATRON[name]
        if name not in _ALLOWED.get(module, ()):
            raise _Refused(f"{module}.{name}")
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """The index of a distributed checkpoint: names, shapes and places of its tensors.

    Raises:
        CheckpointError: The file is missing, broken, asks for anything beyond plain metadata, or does not place every
            tensor whole in the checkpoint.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = checked_index(_MetadataUnpickler(file).load(), path)
    except FileNotFoundError:
        raise CheckpointError(f"has no {METADATA}: the save was interrupted", where=str(folder)) from None
    except _Refused as error:
        raise CheckpointError(
            f"is refused: it asks for {error}, which no checkpoint needs",
            where=str(path),
            way_out="Do not load it: it may have been made to run code.",
        ) from error
    except BROKEN as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"is broken: {type(error).__name__}: {reason}", where=str(path)) from error
    return metadata


class MetadataReader(FileSystemReader):
    """torch's reader with its `.metadata` read once, through the restricted unpickler.

    Args:
        path: A distributed checkpoint.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.metadata = read_metadata(path)
        # As torch's own `read_metadata` does: an index may lack it.
        self.metadata.storage_meta = self.metadata.storage_meta or StorageMeta()
        self.storage_data = self.metadata.storage_data

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """What was read when the reader was made; torch asks again at every load."""
        return self.metadata
