"""A file of features: safetensors, with the rows that it is about and the tensors' checksums in the header.

It says all that must be known after a crash: which batches of the work are in it, which rows they had, which of them
were skipped. It appears under its name whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from mindspeed_mm.checkpoint.safetensors_file import read_header, write_safetensors
from mindspeed_mm.core.artifacts import atomic_file
from mindspeed_mm.core.errors import DataError, ModelFolderError
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.fsdp.data.feature_store.records import FeatureRecord, SkippedRow, TensorFacts

Verification = Literal["hash", "size"]

_FACTS = "mindspeed_mm_features"
"""The one entry of the header's metadata: the library orders several as it likes, and files must be reproducible."""


_XXH3 = "xxh3_128:"


class DamagedFile(DataError):
    """A file of features that is cut, changed or none."""


@dataclass(frozen=True)
class FileFacts:
    """What a file says of its content."""

    first_batch: int
    last_batch: int
    records: Sequence[FeatureRecord]
    skipped: Sequence[SkippedRow]
    checksums: Mapping[str, str]
    """Tensor → its `checksum`."""


def write_feature_file(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    batches: tuple[int, int] = (0, 0),
    records: Sequence[FeatureRecord] = (),
    skipped: Sequence[SkippedRow] = (),
) -> None:
    """Write a file, forced to the disk, then give it its name.

    Args:
        path: The final name.
        tensors: On the CPU, contiguous.
        batches: First and last batch of the work that are in it.
        records: The rows encoded; duplicates may point to tensors in an earlier file.
        skipped: Rows of these batches that could not be used.

    Raises:
        OSError: The disk is full, or cannot be written.
    """
    checksums = {name: checksum(tensor) for name, tensor in sorted(tensors.items())}
    facts = FileFacts(*batches, records, skipped, checksums)
    with atomic_file(path) as draft:
        write_safetensors(tensors, draft, {_FACTS: _to_text(facts)})


def read_facts(path: Path) -> tuple[FileFacts, dict[str, TensorFacts]]:
    """What a file says of itself, and dtype and shape of its tensors. The tensors are not read.

    Raises:
        DamagedFile: It is missing, cut, or not of this kind.
    """
    try:
        entries = read_header(path)
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {})[_FACTS]
        facts = _from_text(text)
    except ModelFolderError as error:
        raise DamagedFile(error.problems[0].what, where=str(path)) from error
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise DamagedFile(f"is not a file of features ({type(error).__name__}: {error})", where=str(path)) from error
    shapes = {name: (dtype_name(entry.dtype), entry.shape) for name, entry in entries.items()}
    if facts.checksums.keys() != shapes.keys():
        raise DamagedFile("holds other tensors than its list says", where=str(path))
    return facts, shapes


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a file, mapped from the disk.

    Raises:
        DamagedFile: It is missing, cut or no safetensors file.
    """
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is not a dict)
    except (SafetensorError, OSError) as error:
        raise DamagedFile(str(error), where=str(path)) from error


def check_file(path: Path, verification: Verification) -> None:
    """Raise `DamagedFile` when a file is not what was written.

    Args:
        path: The file.
        verification: `size` looks at the header, which must describe the file's bytes and carry its own checksum;
            `hash` also reads every byte.
    """
    facts, _ = read_facts(path)
    if verification == "hash":
        check_tensors(path, facts)


def check_tensors(path: Path, facts: FileFacts) -> None:
    """Raise `DamagedFile` when the bytes of a tensor are not what the file says of them."""
    for name, tensor in read_tensors(path).items():
        if not has_checksum(tensor, facts.checksums[name]):
            raise DamagedFile(f"the bytes of '{name}' have changed", where=str(path))


def checksum(tensor: torch.Tensor) -> str:
    """XXH3 of dtype, shape and bytes, behind the hash's name: training reads as fast as the disk is, and verifies."""
    return f"{_XXH3}{_digest(xxhash.xxh3_128(), tensor)}"


def has_checksum(tensor: torch.Tensor, told: str) -> bool:
    """Whether a tensor has the checksum that its file notes; those of format version 1 are 32 digits of SHA-256."""
    if told.startswith(_XXH3):
        return checksum(tensor) == told
    return _digest(hashlib.sha256(), tensor)[:32] == told


def _digest(hashed: Any, tensor: torch.Tensor) -> str:
    hashed.update(f"{dtype_name(tensor.dtype)}{tuple(tensor.shape)}".encode())
    hashed.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return str(hashed.hexdigest())


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module: `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def _to_text(facts: FileFacts) -> str:
    """JSON, behind its own checksum."""
    content = {
        **vars(facts),
        "records": [record.to_json() for record in facts.records],
        "skipped": [asdict(row) for row in facts.skipped],
    }
    text = json.dumps(content, ensure_ascii=False, sort_keys=True)
    return f"{hashlib.sha256(text.encode()).hexdigest()[:32]} {text}"


def _from_text(text: str) -> FileFacts:
    told, _, body = text.partition(" ")
    if hashlib.sha256(body.encode()).hexdigest()[:32] != told:
        raise ValueError("its list of rows has changed")
    content: dict[str, Any] = parse_json(body)
    records = [FeatureRecord.from_json(line) for line in content.pop("records")]
    return FileFacts(**content | {"records": records, "skipped": [SkippedRow(**row) for row in content["skipped"]]})
