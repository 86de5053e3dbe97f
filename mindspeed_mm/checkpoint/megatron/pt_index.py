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
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

Entry = tuple[str, Sequence[int], Sequence[int], int, int, int]
"""A tensor: dtype, shape, strides, first byte in the file, elements into the storage, bytes of the storage."""


class PtIndex(TypedDict):
    """Lists the tensors, numbers and text that a file of `torch.save` holds."""

    tensors: dict[str, dict[str, Entry]]
    """Top-level key → dotted name below it → tensor; only keys whose value holds tensors."""
    values: dict[str, int | float | str | bool]
    """Numbers and text at the top level."""
    shapes: dict[str, list[int]]
    """Of LayerZeRO's files: name of a parameter → its whole shape, of which every rank holds a flat piece."""


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
_BEFORE_1_6 = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
"""What torch's older files begin with, which are no archives: the pickle of `MAGIC_NUMBER`."""
_MEMORY_BYTES = 4 << 30
_CPU_SECONDS = 120


_SHARDS, _SHARD = "shard_state_dict", "ShardFlattenInfo"
"""Table and class by which MindSpeed's LayerZeRO says how its flat pieces lie (its `layerzero/state/fqn.py`)."""


class OldFormat(ValueError):
    """The file is one pickle with the tensors behind it, as torch wrote before 1.6, and no archive."""


class _Name:
    """A class or function that a file asks for, by name only."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __call__(self, *arguments: object, **_: object) -> _Made:
        return _Made(self, arguments)


class _Made:
    """What a named class or function would have made. It takes any content, and forgets it but for LayerZeRO's."""

    def __init__(self, maker: _Name, arguments: tuple[Any, ...]) -> None:
        self.maker, self.arguments = maker, arguments
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        if self.maker.name == _SHARD:
            self.state = state

    def __setitem__(self, key: object, value: object) -> None: ...
    def append(self, item: object) -> None: ...
    def extend(self, items: object) -> None: ...
    def add(self, item: object) -> None: ...


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        if (module, name) == ("collections", "OrderedDict"):
            # The one class that is taken as it is: state dicts are of it.
            return OrderedDict
        if not _is_expected(module, name):
            raise PermissionError(f"{module}.{name}")
        return _made_class(module, name)

    def persistent_load(self, pid: object) -> object:
        return pid


def _made_class(module: str, name: str) -> type:
    """A class of its own for each name, since a pickle may call `__new__` on it."""

    def new(cls: type, *arguments: object, **_: object) -> _Made:
        return _Made(_Name(module, name), arguments)

    return type(name, (), {"__new__": new, "__module__": module})


def _is_expected(module: str, name: str) -> bool:
    top = module.partition(".")[0]
    if top in {"builtins", "__builtin__"}:
        return name in _HARMLESS_BUILTINS
    return top in _HARMLESS or top.startswith(("megatron", "mindspeed", "transformer_engine", "apex", "deepspeed"))


def read_index(path: str) -> PtIndex:
    """Find the tensors of an archive.

    Args:
        path: A file of `torch.save`.

    Raises:
        PermissionError: The file names something that weights do not need; its message is the name.
        OldFormat: The file is of torch before 1.6.
        ValueError: The file is not one of `torch.save`, or is damaged.
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
        with Path(path).open("rb") as raw:
            if raw.read(len(_BEFORE_1_6)) == _BEFORE_1_6:
                raise OldFormat from error
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _index_of(archive: zipfile.ZipFile, raw: BinaryIO) -> PtIndex:
    names = archive.namelist()
    # Of two members of one name, two readers may take different ones.
    for name, times in Counter(names).items():
        if times > 1:
            raise ValueError(f"it has two members called {name}")
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
    index = PtIndex(tensors={}, values={}, shapes=_shapes_in(content.get(_SHARDS)))
    for key, value in content.items():
        if isinstance(value, int | float | str | bool):
            index["values"][_key_text(key)] = value
        found = {name: _tensor_entry(name, made, place_of) for name, made in tables.tensors_in(value, "")}
        if found:
            index["tensors"][_key_text(key)] = found
    return index


def _shapes_in(table: object) -> dict[str, list[int]]:
    """The whole shapes that LayerZeRO's table says."""
    found: dict[str, list[int]] = {}
    if not isinstance(table, dict):
        return found
    for name, made in table.items():
        state = made.state if isinstance(made, _Made) and isinstance(made.state, dict) else {}
        shape = state.get("shape")
        if isinstance(shape, _Made):  # a torch.Size
            shape = shape.arguments[0] if shape.arguments else ()
        if not isinstance(shape, tuple) or not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError(f"{_key_text(name)} has no shape in {_SHARDS}")
        if state.get("tensor_model_parallel"):
            raise ValueError(f"{_key_text(name)} is divided by tensor parallelism, which is not read of LayerZeRO")
        found[_key_text(name)] = list(shape)
    return found


class _Tables:
    """Finds tensors in tables of tables, and counts what it sees."""

    def __init__(self) -> None:
        self.seen = 0

    def tensors_in(self, value: object, name: str) -> Iterator[tuple[str, _Made]]:
        self.seen += 1
        if self.seen > _MOST_ENTRIES:
            raise ValueError(f"its tables have more than {_MOST_ENTRIES:,} entries")
        if isinstance(value, _Made) and value.maker.name.startswith("_rebuild_"):
            yield name, value
        elif isinstance(value, dict):
            for key, inner in value.items():
                yield from self.tensors_in(inner, f"{name}.{_key_text(key)}" if name else _key_text(key))


def _key_text(key: object) -> str:
    """A table's key. Those of tensors are text and numbers; the text of anything else may have any length."""
    if isinstance(key, (str, int)):
        return str(key)
    return type(key).__name__


def _tensor_entry(name: str, made: _Made, place_of: Callable[[str], tuple[int, int]]) -> Entry:
    # A parameter holds the tensor as its first argument.
    while made.maker.name.startswith("_rebuild_parameter"):
        made = made.arguments[0]
    arguments = made.arguments
    # (storage, offset, shape, strides, requires_grad, hooks), then in version 3 the dtype, then metadata.
    match made.maker.name:
        case "_rebuild_tensor_v3":
            dtype, metadata = _name_of(arguments[6]), arguments[7:]
        case "_rebuild_tensor_v2" | "_rebuild_tensor":
            dtype, metadata = "", arguments[6:]
        case other:
            raise ValueError(f"holds a tensor of a kind that is not read: {other}")
    (_, storage_class, storage, _, count), offset, shape, strides = arguments[:4]
    if any(metadata):
        raise ValueError(f"{name} is stored as a view that is not read (negated or conjugated)")
    if not all(type(number) is int for number in (count, offset, *shape, *strides)):
        raise ValueError(f"{name} has a shape, stride or offset that is not a whole number")
    kind = _name_of(storage_class)
    first_byte, size = place_of(str(storage))
    # A storage without a type counts bytes.
    element = _ELEMENT_BYTES.get(_DTYPE_OF_STORAGE.get(kind, ""), 1)
    # Else a tensor could reach beyond its own storage.
    if count * element != size:
        raise ValueError(f"{name} names {count * element} bytes, and data/{storage} holds {size}")
    return dtype or _DTYPE_OF_STORAGE.get(kind, kind), list(shape), list(strides), first_byte, offset, size


def _name_of(named: object) -> str:
    """The name of a class or function that a file names."""
    if isinstance(named, type):
        return named.__name__
    return str(named)


def _first_byte(entry: zipfile.ZipInfo, raw: BinaryIO) -> int:
    """Of a stored member's content: behind its local header, whose name and extra field have lengths of their own."""
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{entry.filename} is compressed")
    raw.seek(entry.header_offset)
    # A local header's fixed part; its last two fields are the two lengths, of 16 bits each.
    header = raw.read(30)
    if header[:4] != b"PK\x03\x04":
        raise ValueError(f"{entry.filename} has no header")
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    first: int = entry.header_offset + 30 + name_length + extra_length
    return first


def main() -> None:
    """Print the index of each file named, one JSON object a line; an error is an object with `refused`, `old` or
    `broken`."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    # It writes no file; the answer goes through a pipe, which this does not limit.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    for path in sys.argv[1:]:
        try:
            answer = json.dumps(read_index(path))
        except PermissionError as error:
            answer = json.dumps({"refused": str(error)})
        except OldFormat:
            answer = json.dumps({"old": True})
        except (ValueError, OSError, MemoryError, RecursionError) as error:
            answer = json.dumps({"broken": str(error) or type(error).__name__})
        print(answer, flush=True)


if __name__ == "__main__":
    main()
