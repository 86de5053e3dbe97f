"""The kinds of files that a conversion writes, each tensor by tensor, and reads back to compare."""

from __future__ import annotations

import hashlib
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mindspeed_mm.checkpoint.conversion.pt_writing import Entry, write_pt
from mindspeed_mm.checkpoint.lazy_tensor import HeldTensor, LazyTensor
from mindspeed_mm.checkpoint.pt_files import load_weights
from mindspeed_mm.checkpoint.safetensors_file import DTYPES, read_header
from mindspeed_mm.checkpoint.safetensors_folder import MAPPED_BYTES, MappedFiles
from mindspeed_mm.core.json_file import JsonObject

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_MOST_DIMS, _MOST_BYTES = 64, 2**62
"""Of one tensor."""
_SUM = re.compile("[0-9a-f]{64}")


def read_sum(text: object) -> str:
    """A SHA-256 from a manifest.

    Raises:
        ValueError: It is none.
    """
    if not isinstance(text, str) or not _SUM.fullmatch(text):
        raise ValueError(f"has the SHA-256 {text!r:.40}, which is not one")
    return text


@dataclass(frozen=True)
class TensorRecord:
    """What the manifest says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str
    """SHA-256 of its bytes, row after row."""

    @property
    def size_bytes(self) -> int:
        """Size of the tensor in bytes, computed from shape and dtype."""
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize

    @classmethod
    def read(cls, record: object) -> TensorRecord:
        """From a manifest, which anybody may have written.

        Raises:
            ValueError: What is wrong with it.
        """
        if not isinstance(record, dict) or record.keys() != {"dtype", "shape", "sha256"}:
            raise ValueError("does not have dtype, shape and sha256")
        dtype, shape = record["dtype"], record["shape"]
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise ValueError(f"has the dtype {dtype!r:.40}, which torch does not know")
        if not isinstance(shape, list) or not all(type(n) is int and 0 <= n <= _MOST_BYTES for n in shape):
            raise ValueError(f"has the shape {shape!r:.40}, which is not a list of whole numbers")
        if len(shape) > _MOST_DIMS or math.prod(shape) * _DTYPES[dtype].itemsize > _MOST_BYTES:
            raise ValueError(f"has the shape {shape!r:.40}, which is more than there can be")
        return cls(dtype, tuple(shape), read_sum(record["sha256"]))

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorRecord:
        """The record of a tensor in memory."""
        digest = hashlib.sha256(bytes_of(tensor)).hexdigest()
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), digest)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, row after row; no copy of one that lies so."""
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


Note = Callable[[str, torch.Tensor], None]
"""Is told each tensor that was written, by its key in the file."""


class OutputFile(ABC):
    """One file, or a folder that counts as one, of a conversion's output."""

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, LazyTensor]:
        """What is in it, by a key that is unique in the file, in the order of writing."""

    @abstractmethod
    def write(self, path: Path, note: Note) -> None:
        """Write it. `path` does not exist, its folder does. Each tensor is told to `note` once."""

    @abstractmethod
    def open_written(self, path: Path) -> AbstractContextManager[Mapping[str, LazyTensor]]:
        """What was written, by the same keys, open for the length of the `with` block."""

    @property
    def size_bytes(self) -> int:
        """Size of all tensors of the file together, in bytes, without headers."""
        return sum(tensor.size_bytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class SafetensorsFile(OutputFile):
    """A `.safetensors` file, written tensor by tensor: no more than one is in memory."""

    content: Mapping[str, LazyTensor]
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})
    """Text in the file's header."""

    @property
    def tensors(self) -> Mapping[str, LazyTensor]:
        """By the keys of the file's header."""
        return self.content

    def write(self, path: Path, note: Note) -> None:
        """The header, then the bytes of each tensor, the wider types first."""
        # Wider types first, so that every tensor starts at a multiple of its own width.
        keys = sorted(self.tensors, key=lambda key: -self.tensors[key].dtype.itemsize)
        with path.open("wb") as file:
            file.write(self._header(keys))
            for key in keys:
                tensor = self.tensors[key].read()
                file.write(bytes_of(tensor))
                note(key, tensor)

    def _header(self, keys: list[str]) -> bytes:
        names = {dtype: name for name, dtype in DTYPES.items()}
        header: dict[str, object] = {}
        if self.metadata:
            header["__metadata__"] = dict(self.metadata)
        position = 0
        for key in keys:
            tensor = self.tensors[key]
            end = position + tensor.size_bytes
            header[key] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
            position = end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)  # so that the tensors behind it are aligned
        return len(text).to_bytes(8, "little") + text

    @contextmanager
    def open_written(self, path: Path) -> Iterator[Mapping[str, LazyTensor]]:
        """The file's own header says where tensors lie; they are mapped, not loaded."""
        with closing(MappedFiles(MAPPED_BYTES)) as files:
            yield files.stored(read_header(path))


@dataclass(frozen=True)
class PtFile(OutputFile):
    """A file as of `torch.save`, written tensor by tensor: no more than one is in memory."""

    sections: Mapping[str, Mapping[str, LazyTensor]]
    """Section → key → tensor, written as `{"model": {key: tensor}}`; the section "" is the file's own top level."""
    extras: Mapping[str, object] = field(default_factory=dict)
    """Plain values beside the sections, as `{"checkpoint_version": 3.0}`."""

    @property
    def tensors(self) -> Mapping[str, LazyTensor]:
        """By `section/key`; those of the top level by their key alone."""
        found: dict[str, LazyTensor] = {}
        for name, part in self.sections.items():
            for key, tensor in part.items():
                found[_joined(name, key)] = tensor
        return found

    def write(self, path: Path, note: Note) -> None:
        """As `torch.save` writes it, the storage of each tensor when its turn comes."""
        content: JsonObject = dict(self.extras)
        for name, part in self.sections.items():
            place = content if name == "" else content.setdefault(name, {})
            for key, tensor in part.items():
                place[key] = Entry(_joined(name, key), tensor)

        def read(entry: Entry) -> memoryview:
            tensor = entry.tensor.read()
            note(entry.name, tensor)
            return bytes_of(tensor)

        write_pt(content, path, read)

    @contextmanager
    def open_written(self, path: Path) -> Iterator[Mapping[str, LazyTensor]]:
        """Loaded whole, without running code of the file's; values that are no tensors are left out."""
        content = load_weights(path)
        found: dict[str, LazyTensor] = {}
        for name in self.sections:
            part = content if name == "" else content.get(name)
            if not isinstance(part, dict):
                continue
            for key, tensor in part.items():
                if isinstance(tensor, torch.Tensor):
                    found[_joined(name, key)] = HeldTensor(tensor)
        yield found


def _joined(section: str, key: str) -> str:
    if section:
        return f"{section}/{key}"
    return key
