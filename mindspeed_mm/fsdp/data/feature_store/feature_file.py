"""A file of features: safetensors, with the rows that it is about and the tensors' checksums in the header.

It says all that must be known after a crash: which batches of the work are in it, which rows they had, which of them
were skipped. It appears under its name whole or not at all. What is known of a row besides its tensors is one line of
`index.jsonl`, or of `skipped.jsonl`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from mindspeed_mm.checkpoint.safetensors_file import read_header_and_notes, write_safetensors
from mindspeed_mm.core.artifacts import atomic_file
from mindspeed_mm.core.errors import DataError, ModelFolderError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject, parse_json
from mindspeed_mm.core.media_geometry import MediaSize

TensorFacts = tuple[str, tuple[int, ...]]
"""dtype and shape, as JSON has them: `("float32", (16, 1, 8, 8))`."""


@dataclass(frozen=True)
class FeatureRecord:
    """A row that was encoded."""

    row: int
    """Number of the row in the data, from 0."""
    key: str
    """`content_key` of the row: the tensors' prefix, and the sample's id in training."""
    place: str
    """Where the row stands, `rows.jsonl:3`."""
    path: str
    """Path of the medium, as the row has it."""
    captions: tuple[str, ...]
    size: MediaSize
    """In pixels, as encoded."""
    fps: float = 0.0
    """Frames a second of the clip as encoded; 0 of a picture, and in sets of versions that did not note it."""
    shard: str = ""
    """File that holds its tensors."""
    tensors: Mapping[str, TensorFacts] = field(default_factory=dict)
    """Name without the key → dtype and shape: `latents`, `prompt_embeds/0` …"""
    said: str = ""
    """`GenerationRow.digest` of the row; empty in sets of versions that did not note it."""
    cut_captions: int = 0
    """Number of captions that are longer than what the text encoder reads."""
    repeats: int = 1
    """How often an epoch reads the row."""
    is_prior: bool = False
    """Whether the row preserves the prior."""
    scores: Sequence[float] = ()
    """Of the chosen and the rejected side of a preference pair, where the row has them."""
    medium: str = ""
    """Digest of the medium's file, 32 hex digits; like the next two empty in sets of versions that did not note it."""
    pixels: str = ""
    """What latents and conditions were made of: digest of the file, size, frames and views."""
    stem: str = ""
    """What the names of its own tensors begin with; empty: `key`."""
    media_stem: str = ""
    """The same of an older row whose latents and conditions are its own too; empty: it has its own."""
    caption_stems: Sequence[str] = ()
    """For each caption `<stem>/<number>` of an older row with the same caption, or empty; none: all are its own."""
    header: Sequence[Any] = ()
    """Height, width, frames and frames a second of the medium as stored; like the next empty in sets of versions that
    did not note it."""
    beside: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Role → kind of the further medium, and the same of it; of a sound its kind alone."""
    places: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Name without the key → file, and name in it, of the tensors that it shares with an older row."""

    @property
    def own_stem(self) -> str:
        """What the names of its own tensors begin with."""
        return self.stem or self.key

    @property
    def views(self) -> int:
        """How many views of the medium were encoded."""
        return 1 + sum(name.startswith("latents@") for name in self.tensors)

    def to_json(self) -> JsonObject:
        """A line of the index."""
        size = [self.size.frames, self.size.height, self.size.width]
        beside = [self.size.sound, self.size.pictures, self.size.lacks_video]
        while beside and not beside[-1]:  # versions before these knew frames, height and width alone
            beside.pop()
        # Not `asdict`, whose copies took most of the time of a large index.
        return {**vars(self), "size": [*size, *beside]}

    @classmethod
    def from_json(cls, line: JsonMapping) -> FeatureRecord:
        """What `to_json` gave.

        Raises:
            TypeError, ValueError, KeyError: It is not such a line.
        """
        content = {name: line[name] for name in _NAMES if name in line}
        content["captions"], content["size"] = tuple(line["captions"]), MediaSize(*line["size"])
        for name in ("scores", "caption_stems", "header"):
            content[name] = tuple(line.get(name, ()))
        for name in ("tensors", "places"):
            content[name] = {key: _as_pair(value) for key, value in line.get(name, {}).items()}
        return cls(**content)


_NAMES = tuple(entry.name for entry in fields(FeatureRecord))


def _as_pair(value: Sequence[object]) -> tuple[str, object]:
    """dtype and shape, or file and name in it; lists of JSON become tuples. Raises `ValueError` for anything else."""
    first, second = value
    return str(first), tuple(second) if isinstance(second, list) else str(second)


@dataclass(frozen=True)
class SkippedRow:
    """A row that could not be used."""

    row: int | None
    """None: it could not even be read, so it has no number among the others."""
    place: str
    path: str
    reason: str
    said: str = ""
    """As in `FeatureRecord`; empty too of a row that could not be read."""


def tensor_name(key: str, name: str, caption: int | None = None, *, view: int = 0) -> str:
    """`<key>/<name>`, for features of a caption `<key>/<name>/<its number>`, for views of a medium behind the first
    `<key>/<name>@<its number>`."""
    if view:
        name = f"{name}@{view}"
    if caption is not None:
        name = f"{name}/{caption}"
    return f"{key}/{name}"


Verification = Literal["hash", "size"]

_FACTS = "mindspeed_mm_features"
"""The one entry of the header's metadata: the library orders several as it likes, and files must be reproducible."""


_XXH3 = "xxh3_128:"
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header."""


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
    """What a file says of itself, and dtype and shape of its tensors, in the order of their bytes. The tensors are not
    read.

    Raises:
        DamagedFile: It is missing, cut, or not of this kind.
    """
    try:
        entries, notes = read_header_and_notes(path)
        facts = _from_text(str(notes[_FACTS]))
    except ModelFolderError as error:
        raise DamagedFile(error.problems[0].what, where=str(path)) from error
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DamagedFile(f"is not a file of features ({type(error).__name__}: {error})", where=str(path)) from error
    shapes: dict[str, TensorFacts] = {}
    for name, entry in sorted(entries.items(), key=lambda each: each[1].begin):
        shapes[name] = (dtype_name(entry.dtype), entry.shape)
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
    facts, shapes = read_facts(path)
    if verification == "hash":
        check_tensors(path, facts, shapes)


def check_tensors(path: Path, facts: FileFacts, shapes: Mapping[str, TensorFacts]) -> None:
    """Raise `DamagedFile` when the bytes of a tensor are not what the file says of them.

    Args:
        path: The file.
        facts: As of `read_facts`, like the next.
        shapes: In the order of the tensors' bytes.
    """
    # The bytes are hashed where they are mapped: to make a tensor of each takes ten times as long as its hash.
    try:
        with (
            path.open("rb") as file,
            mmap(file.fileno(), 0, access=ACCESS_READ) as mapped,
            memoryview(mapped) as content,
        ):
            # Bytes of tensors follow one another without a hole, see `read_header`.
            begin = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
            for name, told in shapes.items():
                dtype, shape = told
                end = begin + math.prod(shape) * getattr(torch, dtype).itemsize
                if not _is_of(facts.checksums[name], told, content[begin:end]):
                    raise DamagedFile(f"the bytes of '{name}' have changed", where=str(path))
                begin = end
    except (OSError, ValueError) as error:  # of a file that is gone, or cut, since its header was read
        raise DamagedFile(str(error), where=str(path)) from error


def checksum(tensor: torch.Tensor) -> str:
    """XXH3 of dtype, shape and bytes, behind the hash's name: training reads as fast as the disk is, and verifies."""
    # XXH3 finds damage, not tampering: nobody is kept from writing other features with a fitting checksum.
    return f"{_XXH3}{_digest(xxhash.xxh3_128(), _facts_of(tensor), _bytes_of(tensor))}"


def has_checksum(tensor: torch.Tensor, told: str) -> bool:
    """Whether a tensor has the checksum that its file notes; those of format version 1 are 32 digits of SHA-256."""
    return _is_of(told, _facts_of(tensor), _bytes_of(tensor))


def _is_of(checksum_told: str, facts: TensorFacts, content: memoryview) -> bool:
    """Whether a checksum is that of a tensor with these bytes."""
    if checksum_told.startswith(_XXH3):
        return _digest(xxhash.xxh3_128(), facts, content) == checksum_told[len(_XXH3) :]
    return _digest(hashlib.sha256(), facts, content)[:32] == checksum_told


def _digest(hashed: Any, facts: TensorFacts, content: memoryview) -> str:
    dtype, shape = facts
    hashed.update(f"{dtype}{shape}".encode())
    hashed.update(content)
    return str(hashed.hexdigest())


def _facts_of(tensor: torch.Tensor) -> TensorFacts:
    return dtype_name(tensor.dtype), tuple(tensor.shape)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    # As bytes: numpy knows no bfloat16, and a view makes no copy of a mapped tensor.
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


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
    # Sorted: the same work gives the same bytes, whatever order the tensors came in.
    text = json.dumps(content, ensure_ascii=False, sort_keys=True)
    return f"{hashlib.sha256(text.encode()).hexdigest()[:32]} {text}"


def _from_text(text: str) -> FileFacts:
    told, _, body = text.partition(" ")
    if hashlib.sha256(body.encode()).hexdigest()[:32] != told:
        raise ValueError("its list of rows has changed")
    content: JsonObject = parse_json(body)
    records = [FeatureRecord.from_json(line) for line in content.pop("records")]
    return FileFacts(**content | {"records": records, "skipped": [SkippedRow(**row) for row in content["skipped"]]})
