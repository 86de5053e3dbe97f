"""One safetensors file: its header is read and checked, so that a damaged file is named for what it is, and it is
written with the operating system's own errors.

The library's own reader calls a Git LFS pointer or an HTML page "header too large" and accepts a key that stands twice.
Format: 8 bytes little-endian header length, a JSON header, the tensors' bytes without holes
(https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import JsonObject, parse_json

# --- reading ----------------------------------------------------------------------------------------------------------


MAX_HEADER_BYTES = 100_000_000
"""The library's own cap."""

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""Names of the format → torch. Half-byte types have no torch counterpart here and are refused."""


@dataclass(frozen=True)
class TensorEntry:
    """Describes one tensor of a safetensors file: its key, its file, dtype and shape."""

    key: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int = field(default=0, compare=False)
    """Number of its first byte, counted from the end of the header."""

    @property
    def size_bytes(self) -> int:
        """Number of bytes that the tensor takes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file, by key, without reading them.

    Raises:
        ModelFolderError: The file is empty, cut, a Git LFS pointer, a web page, holds a key twice or has a header that
            does not describe its bytes.
    """
    return read_header_and_notes(file)[0]


def read_header_and_notes(file: Path) -> tuple[dict[str, TensorEntry], JsonObject]:
    """The tensors as of `read_header`, and the texts that stand in the header beside them. Raises as `read_header`."""
    file_bytes = _file_size(file)
    with file.open("rb") as stream:
        header = _parse(_header_text(stream, file, file_bytes), file)
        data_bytes = file_bytes - stream.tell()
    # The one key that is no tensor.
    notes: JsonObject = header.pop("__metadata__", None) or {}
    entries = {key: _entry(key, value, file) for key, value in header.items()}
    # By place in the file, not by key: neighbours must touch.
    spans = sorted(tuple(value["data_offsets"]) for value in header.values())
    _check_spans(spans, data_bytes, file)
    for key, value in header.items():
        begin, end = value["data_offsets"]
        if end - begin != entries[key].size_bytes:
            raise _damaged(file, f"'{key}' takes {end - begin} bytes, its shape {entries[key].size_bytes}")
    return entries, notes


def _file_size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise ModelFolderError(
            f"cannot be read: {error.strerror}", where=str(file), way_out="Copy the file again."
        ) from error


def _header_text(stream: BinaryIO, file: Path, file_bytes: int) -> bytes:
    # Enough for what such files begin with, in place of a header that may claim terabytes.
    start = stream.read(64)
    if file_bytes == 0:
        raise _damaged(file, "the file is empty")
    if start.startswith(b"version https://git-lfs"):
        raise ModelFolderError(
            "is a Git LFS pointer, not the weights", where=str(file), way_out="Run 'git lfs pull' in the folder."
        )
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise _damaged(file, f"is a web page (starts with {start.lstrip()[:9].decode(errors='replace')!r})")
    length = int.from_bytes(start[:8], "little")
    if file_bytes < 8 or length > MAX_HEADER_BYTES:
        raise _damaged(file, f"is not a safetensors file (starts with {start[:8]!r})")
    if file_bytes < 8 + length:
        raise _damaged(file, f"is cut: {file_bytes} bytes, of which the header alone would take {8 + length}")
    stream.seek(8)
    return stream.read(length)


def _parse(text: bytes, file: Path) -> JsonObject:
    def unique(pairs: list[tuple[str, Any]]) -> JsonObject:
        found: JsonObject = {}
        for name, value in pairs:
            if name in found:
                raise _damaged(file, f"the header holds the key '{name}' twice")
            found[name] = value
        return found

    try:
        header = parse_json(text, pairs=unique)
    except ValueError as error:
        raise _damaged(file, f"the header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(file, "the header is not a table of tensors")
    return header


def _entry(key: str, value: Any, file: Path) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        plausible = all(isinstance(n, int) and n >= 0 for n in [*shape, begin, end])
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged(file, f"the header's entry of '{key}' is incomplete") from error
    if not plausible:
        raise _damaged(file, f"the header's entry of '{key}' has a negative or non-integer size")
    if not isinstance(dtype, str):
        raise _damaged(file, f"the header's entry of '{key}' has the type {dtype!r}, which is not a name")
    if dtype not in DTYPES:
        raise ModelFolderError(
            f"'{key}' is stored as {dtype}, which cannot be trained",
            where=str(file),
            way_out="Use the unquantised weights of this model.",
        )
    return TensorEntry(key, file, DTYPES[dtype], tuple(shape), begin)


def _check_spans(spans: list[tuple[int, ...]], data_bytes: int, file: Path) -> None:
    position = 0
    for begin, end in spans:
        if begin != position:
            raise _damaged(file, f"the header leaves a hole or an overlap at byte {position}")
        position = end
    if position > data_bytes:
        raise _damaged(file, f"is cut: {data_bytes} bytes of tensors, the header promises {position}")
    if position < data_bytes:
        raise _damaged(file, f"holds {data_bytes - position} bytes that its header does not name")


def _damaged(file: Path, what: str) -> ModelFolderError:
    return ModelFolderError(what, where=str(file), way_out="Copy or download the file again.")


# --- writing ----------------------------------------------------------------------------------------------------------


def write_safetensors(tensors: Mapping[str, torch.Tensor], path: Path, notes: Mapping[str, str] | None = None) -> None:
    """Write tensors. The library makes a file that only its owner may read, whatever the umask says; this one has the
    umask's mode.

    Args:
        tensors: Contiguous, none sharing memory with another.
        path: The file; replaced when it is there.
        notes: Text for the header.

    Raises:
        OSError: The disk is full, or the file cannot be written.
    """
    # Made here first, so that the umask decides; `save_file` replaces it, and the mode is set again.
    path.touch()
    mode = path.stat().st_mode
    try:
        safetensors.torch.save_file(dict(tensors), path, None if notes is None else dict(notes))
    except SafetensorError as error:
        # The library reports `... (os error 28)` as text only.
        number = str(error).rpartition("os error ")[2].rstrip(") ")
        # 5: EIO
        raise OSError(int(number) if number.isdigit() else 5, str(error), str(path)) from error
    path.chmod(mode)
