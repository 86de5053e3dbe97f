"""Writes a file that `torch.load` reads, tensor by tensor: `torch.save` must have them all in memory.

The format is a zip archive without compression (torch's `serialization.py`, `caffe2/serialize/inline_container.cc`).
`data.pkl` holds the pickle, in which each storage is a persistent id; `data/0`, `data/1` … hold the storages' bytes.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor

_FOLDER = "archive"
"""Everything lies in one folder, whatever its name."""
_ALIGNED_BYTES = 64
"""Storages begin at multiples of this, so that a mapped file gives aligned tensors."""
_HEADER_BYTES = 30 + 20
"""Before a record, its name and padding apart: the header, and the field of sizes beyond 4 GB."""
_PROTOCOL = 2


@dataclass(frozen=True, eq=False)
class Entry:
    """A tensor of the content, read when its turn comes."""

    name: str
    tensor: LazyTensor


def write_pt(content: Mapping[str, object], path: Path, read: Callable[[Entry], memoryview]) -> None:
    """Write `content` as `torch.save` would.

    Args:
        content: Mappings and plain values; each tensor is an `Entry` of its own.
        path: The file.
        read: Gives a tensor's bytes, row after row.

    Raises:
        OSError: The disk is full, or the file cannot be written.
    """
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(content)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        _add_entry(archive, "data.pkl", pickled.getbuffer())
        # Else a reader takes the numbers for little-endian.
        _add_entry(archive, "byteorder", memoryview(sys.byteorder.encode()))
        for number, entry in enumerate(pickler.entries):
            _add_entry(archive, f"data/{number}", read(entry))
        _add_entry(archive, "version", memoryview(b"3\n"))


def _add_entry(archive: zipfile.ZipFile, name: str, content: memoryview) -> None:
    info = zipfile.ZipInfo(f"{_FOLDER}/{name}")
    start = archive.start_dir + _HEADER_BYTES + len(info.filename)
    # A field of the header, of four bytes and more, pads it.
    padding = -(start + 4) % _ALIGNED_BYTES
    info.extra = struct.pack("<2sH", b"FB", padding) + bytes(padding)
    with archive.open(info, "w", force_zip64=True) as file:
        file.write(content)


class _Storage:
    """Stands for a tensor's bytes in the pickle."""

    def __init__(self, number: int, tensor: LazyTensor) -> None:
        self.number, self.tensor = number, tensor


class _Pickler(pickle.Pickler):
    """Pickles entries as torch pickles tensors that have a storage each."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, _PROTOCOL)
        self.entries: list[Entry] = []

    def reducer_override(self, obj: object) -> Any:
        if not isinstance(obj, Entry):
            return NotImplemented
        tensor, storage = obj.tensor, _Storage(len(self.entries), obj.tensor)
        self.entries.append(obj)
        # Row after row, as `read` gives the bytes.
        stride = torch.empty(tensor.shape, device="meta").stride()
        laid_out: tuple[object, ...] = (storage, 0, tuple(tensor.shape), stride, False, OrderedDict())
        if tensor.dtype in _TYPED:
            return _rebuild_tensor_v2, laid_out
        return _rebuild_tensor_v3, (*laid_out, tensor.dtype)

    def persistent_id(self, obj: object) -> object:
        if not isinstance(obj, _Storage):
            return None
        tensor = obj.tensor
        if tensor.dtype in _TYPED:
            kind, count = getattr(torch, _TYPED[tensor.dtype]), torch.Size(tensor.shape).numel()
        else:
            kind, count = torch.UntypedStorage, tensor.size_bytes
        return "storage", kind, str(obj.number), "cpu", count


_TYPED: dict[torch.dtype, str] = torch.storage._dtype_to_storage_type_map()
"""Newer types have no storage class of their own."""
