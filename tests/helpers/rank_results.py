"""What ranks give back, by file: plain values with thousands of small tensors, each of which `torch.save` and
`torch.load` give a tenth of a millisecond."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import torch

_ALIGNED = 16
"""Bytes."""


def write_result(result: Any, path: Path) -> None:
    """Write numbers, strings and tensors, in lists, tuples and dicts. The file is whole when it exists."""
    draft = path.with_suffix(".tmp")
    with draft.open("wb") as file:
        writer = _Writer(file, protocol=pickle.HIGHEST_PROTOCOL)
        writer.dump(result)
        file.write(writer.content)
        file.write(len(writer.content).to_bytes(8, "little"))
    draft.rename(path)


def read_result(path: Path) -> Any:
    """What `write_result` wrote; tensors are on the host."""
    whole = bytearray(path.read_bytes())
    end = len(whole) - 8
    begin = end - int.from_bytes(whole[end:], "little")
    with path.open("rb") as file:
        return _Reader(file, whole[begin:end]).load()


class _Writer(pickle.Pickler):
    """Keeps the bytes of tensors aside."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.content = bytearray()

    def persistent_id(self, each: Any) -> tuple[torch.dtype, tuple[int, ...], int] | None:
        """Dtype, shape and first byte of a tensor."""
        if not isinstance(each, torch.Tensor):
            return None
        assert type(each) in (torch.Tensor, torch.nn.Parameter), f"{type(each).__name__} is no plain tensor"
        begin = len(self.content)
        content = each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        self.content += content + bytes(-len(content) % _ALIGNED)
        return each.dtype, tuple(each.shape), begin


class _Reader(pickle.Unpickler):
    """Puts tensors back."""

    def __init__(self, file: Any, content: bytearray) -> None:
        super().__init__(file)
        self._content = content

    def persistent_load(self, place: tuple[torch.dtype, tuple[int, ...], int]) -> torch.Tensor:
        """The tensor of a place."""
        dtype, shape, begin = place
        if not (count := math.prod(shape)):
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._content, dtype=dtype, count=count, offset=begin).reshape(shape)
