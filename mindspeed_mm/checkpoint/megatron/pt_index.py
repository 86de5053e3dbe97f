"""Where the tensors lie in a file that `torch.save` wrote: read without torch, and without importing or running what
the file asks for.

The pickle in such a file is a small program. Here it can build containers, numbers and text; every class or function
that it names becomes a record of the name, and what it would call becomes a record of the call. Records of tensors say
dtype, shape, strides and place; all others are dropped. Run as a script, in a process of its own with little memory, it
prints what it found as JSON: this file imports nothing of the package.

The format: `torch/serialization.py` (archive, persistent ids) and `torch/_utils.py` (`_rebuild_tensor_v2` and kin).
"""

from __future__ import annotations

import json
import pickle
import resource
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_DTYPE_OF_STORAGE = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
_ELEMENT_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}
_MOST_ENTRIES = 2_000_000
"""Of all tables in a file together. A table may stand in many places: their number can grow like a power."""
_HARMLESS = ("torch", "numpy", "argparse", "collections", "pathlib", "signal", "_codecs", "enum", "types", "functools")
"""Modules whose names may stand in a checkpoint; those of Megatron and its kin are added in `_is_expected`."""
_HARMLESS_BUILTINS = {"set", "frozenset", "slice", "complex", "bytearray", "range", "list", "dict", "tuple", "getattr"}
_MEMORY_BYTES = 4 << 30
_CPU_SECONDS = 120


class _Name:
    """A class or function that a file asks for, by name only."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __call__(self, *arguments: Any, **_: Any) -> _Made:
        return _Made(self, arguments)


class _Made:
    """What a named class or function would have made. It takes any content and forgets it."""

    def __init__(self, maker: _Name, arguments: tuple[Any, ...]) -> None:
        self.maker, self.arguments = maker, arguments

    def __setstate__(self, state: Any) -> None: ...
    def __setitem__(self, key: Any, value: Any) -> None: ...
    def append(self, item: Any) -> None: ...
    def extend(self, items: Any) -> None: ...
    def add(self, item: Any) -> None: ...


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if not _is_expected(module, name):
            raise PermissionError(f"{module}.{name}")
        return _MadeClass(module, name)

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _MadeClass(module: str, name: str) -> Any:
    """A class of its own for each name, since a pickle may call `__new__` on it."""

    def new(cls: Any, *arguments: Any, **_: Any) -> _Made:
        return _Made(_Name(module, name), arguments)

    return type(name, (), {"__new__": new, "__module__": module})


def _is_expected(module: str, name: str) -> bool:
    top = module.partition(".")[0]
    if top in {"builtins", "__builtin__"}:
        return name in _HARMLESS_BUILTINS
    return top in _HARMLESS or top.startswith(("megatron", "mindspeed", "transformer_engine", "apex", "deepspeed"))


def read_index(path: str) -> dict[str, Any]:
    """Find the tensors of an archive.

    Args:
        path: A file of `torch.save`.

    Returns:
        `tensors`: for each top-level key whose value holds tensors, dotted name → [dtype, shape, strides, first byte in
        the file, number of elements into the storage, bytes of the storage]; `values`: top-level numbers and text.

    Raises:
        PermissionError: The file names something that weights do not need; its message is the name.
        ValueError: The file is none of `torch.save`, or is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive, Path(path).open("rb") as raw:
            return _index_of(archive, raw)
    except PermissionError:
        raise
    except (
        zipfile.BadZipFile,
        pickle.UnpicklingError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
        IndexError,
    ) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _index_of(archive: zipfile.ZipFile, raw: Any) -> dict[str, Any]:
    names = archive.namelist()
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has two members called {twice}")
    (pickled,) = [name for name in names if name.endswith("/data.pkl")] or [""]
    folder = pickled.removesuffix("/data.pkl")
    if f"{folder}/byteorder" in names and archive.read(f"{folder}/byteorder") != b"little":
        raise ValueError("its numbers are not little-endian")
    with archive.open(pickled) as stream:
        content = _IndexUnpickler(stream, encoding="utf-8").load()
    if not isinstance(content, dict):
        raise ValueError(f"holds a {type(content).__name__}, not a table")
    storages: dict[str, tuple[int, int]] = {}

    def place_of(storage: str) -> tuple[int, int]:
        if storage not in storages:
            member = archive.getinfo(f"{folder}/data/{storage}")
            storages[storage] = _first_byte(member, raw), member.file_size
        return storages[storage]

    tables = _Tables()
    tensors = {
        _text(key): {name: _entry(name, made, place_of) for name, made in tables.tensors_in(value, "")}
        for key, value in content.items()
    }
    values = {_text(key): value for key, value in content.items() if isinstance(value, (int, float, str, bool))}
    return {"tensors": {key: found for key, found in tensors.items() if found}, "values": values}


class _Tables:
    """Finds tensors in tables of tables, and counts what it sees."""

    def __init__(self) -> None:
        self.seen = 0

    def tensors_in(self, value: Any, name: str) -> Iterator[tuple[str, _Made]]:
        self.seen += 1
        if self.seen > _MOST_ENTRIES:
            raise ValueError(f"its tables have more than {_MOST_ENTRIES:,} entries")
        if isinstance(value, _Made) and value.maker.name.startswith("_rebuild_"):
            yield name, value
        elif isinstance(value, dict):
            for key, inner in value.items():
                yield from self.tensors_in(inner, f"{name}.{_text(key)}" if name else _text(key))


def _text(key: Any) -> str:
    """A table's key. Those of tensors are text and numbers; the text of anything else may have any length."""
    return str(key) if isinstance(key, (str, int)) else type(key).__name__


def _entry(name: str, made: _Made, place_of: Callable[[str], tuple[int, int]]) -> list[Any]:
    arguments = made.arguments
    while made.maker.name.startswith("_rebuild_parameter"):
        made = arguments[0]
        arguments = made.arguments
    if made.maker.name not in {"_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_tensor"}:
        raise ValueError(f"holds a tensor of a kind that is not read: {made.maker.name}")
    (_, storage_class, storage, _, count), offset, shape, strides = arguments[:4]
    kind = storage_class.__name__ if isinstance(storage_class, type) else str(storage_class)
    third = made.maker.name == "_rebuild_tensor_v3"
    dtype = arguments[6] if third else None
    metadata = arguments[7 if third else 6 :]
    if any(metadata):
        raise ValueError(f"{name} is stored as a view that is not read (negated or conjugated)")
    if not all(type(number) is int for number in (count, offset, *shape, *strides)):
        raise ValueError(f"{name} has a shape, stride or offset that is no whole number")
    dtype_name = _DTYPE_OF_STORAGE.get(kind, kind) if dtype is None else getattr(dtype, "__name__", str(dtype))
    first_byte, size = place_of(str(storage))
    # A storage without a type counts bytes.
    element = _ELEMENT_BYTES.get(_DTYPE_OF_STORAGE.get(kind, ""), 1)
    if count * element != size:
        raise ValueError(f"{name} names {count * element} bytes, and data/{storage} holds {size}")
    return [dtype_name, list(shape), list(strides), first_byte, offset, size]


def _first_byte(entry: zipfile.ZipInfo, raw: Any) -> int:
    """Of a stored member's content: behind its local header, whose name and extra field have lengths of their own."""
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{entry.filename} is compressed")
    raw.seek(entry.header_offset)
    header = raw.read(30)
    if header[:4] != b"PK\x03\x04":
        raise ValueError(f"{entry.filename} has no header")
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    return int(entry.header_offset + 30 + name_length + extra_length)


def main() -> None:
    """Print the index of each file named, one JSON object a line; an error is an object with `refused` or `broken`."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    for path in sys.argv[1:]:
        try:
            answer = json.dumps(read_index(path))
        except PermissionError as error:
            answer = json.dumps({"refused": str(error)})
        except (ValueError, OSError, MemoryError, RecursionError) as error:
            answer = json.dumps({"broken": str(error) or type(error).__name__})
        print(answer, flush=True)


if __name__ == "__main__":
    main()
