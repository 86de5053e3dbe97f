"""The tensors of `torch.save` files as lazy tensors: a process of its own reads the index, this one maps the bytes."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from mindspeed_mm.checkpoint.lazy_tensor import Stored
from mindspeed_mm.checkpoint.megatron import pt_index
from mindspeed_mm.core.errors import CheckpointError
from mindspeed_mm.core.json_file import JsonObject, parse_json

_BROKEN = "Copy the file again."


@dataclass(frozen=True)
class PtContent:
    """Content of one file of `torch.save`, whose tensors are read when they are needed."""

    path: Path
    tensors: dict[str, dict[str, Stored]]
    """Top-level key (`model`, `model0`, `optimizer` …) → dotted name → tensor."""
    values: dict[str, int | float | str | bool]
    """Top-level numbers and text."""
    shapes: dict[str, list[int]]
    """Of LayerZeRO's files: name of a parameter → its whole shape."""


@dataclass(frozen=True)
class _Entry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first_byte: int
    offset: int
    storage_bytes: int

    @property
    def span_bytes(self) -> int:
        """From the storage's beginning to behind the tensor's last element."""
        if 0 in self.shape:
            return 0
        last = self.offset
        for length, stride in zip(self.shape, self.strides, strict=True):
            last += (length - 1) * stride
        return (last + 1) * self.dtype.itemsize


def read_pt_files(paths: Sequence[Path]) -> list[PtContent]:
    """Read the indices of files; their tensors are read when they are needed.

    Raises:
        CheckpointError: A file is missing, damaged, or asks for something that weights do not need.
    """
    for path in paths:
        if not path.is_file():
            raise CheckpointError("does not exist", where=str(path), way_out="Copy the whole folder again.")
    # -I: no PYTHONPATH, no user's packages, no current folder: nothing foreign is imported.
    command = [sys.executable, "-I", str(pt_index.__file__), *map(str, paths)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = answer.stdout.splitlines()
    contents = [_pt_content(path, parse_json(line)) for path, line in zip(paths, lines, strict=False)]
    # One line a file: the first without one is what the process died of, of too much memory or time.
    if len(lines) < len(paths):
        last = (answer.stderr.strip() or f"exit status {answer.returncode}").splitlines()[-1]
        raise CheckpointError(f"cannot be read: {last}", where=str(paths[len(lines)]), way_out=_BROKEN)
    return contents


def _pt_content(path: Path, found: JsonObject) -> PtContent:
    if name := found.get("refused"):
        raise CheckpointError(
            f"is refused: it asks for {name}, which weights do not need",
            where=str(path),
            way_out="It may have been made to run code. Get it from somebody you trust, as tensors alone.",
        )
    if found.get("old"):
        raise CheckpointError(
            "is in the format of torch before 1.6, which cannot be mapped",
            where=str(path),
            way_out="Load it with torch.load(…, weights_only=True), and write it again with torch.save.",
        )
    if why := found.get("broken"):
        what = f"is broken, or not a file that torch.save wrote: {why}"
        raise CheckpointError(what, where=str(path), way_out=_BROKEN)
    file = _MappedFile(path)
    tensors: dict[str, dict[str, Stored]] = {}
    for key, entries in found["tensors"].items():
        tensors[key] = {name: file.stored(name, *entry) for name, entry in entries.items()}
    return PtContent(path, tensors, found["values"], found["shapes"])


class _MappedFile:
    def __init__(self, path: Path) -> None:
        self.path, self.size = path, path.stat().st_size

    def stored(
        self,
        name: str,
        dtype_name: str,
        shape: list[int],
        strides: list[int],
        first_byte: int,
        offset: int,
        storage_bytes: int,
    ) -> Stored:
        dtype = vars(torch).get(dtype_name)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"has an unknown type, {dtype_name}", where=str(self.path), key=name)
        entry = _Entry(dtype, tuple(shape), tuple(strides), first_byte, offset, storage_bytes)
        sane = len(shape) == len(strides) and min([0, *shape, *strides, offset, first_byte]) == 0
        if not sane or entry.span_bytes > storage_bytes or first_byte + storage_bytes > self.size:
            raise CheckpointError("lies outside its storage", where=str(self.path), key=name, way_out=_BROKEN)
        return Stored(name, entry.shape, dtype, lambda: _MappedTensor(self, entry))

    @cached_property
    def bytes(self) -> torch.UntypedStorage:
        return torch.UntypedStorage.from_file(str(self.path), shared=False, nbytes=self.size)


@dataclass(frozen=True)
class _MappedTensor:
    file: _MappedFile
    entry: _Entry

    def get_tensor(self, key: str) -> torch.Tensor:
        entry = self.entry
        if math.prod(entry.shape) == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        # A view of the mapped file; pages are read when numbers are.
        of_tensor = self.file.bytes[entry.first_byte : entry.first_byte + entry.span_bytes]
        return torch.empty(0, dtype=entry.dtype).set_(of_tensor, entry.offset, entry.shape, entry.strides)
