"""`MANIFEST.json`: what a committed checkpoint holds, file by file, and whether the disk still holds exactly that."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from mindspeed_mm.checkpoint.layout import MANIFEST
from mindspeed_mm.core.artifacts import atomic_write_text
from mindspeed_mm.core.errors import CheckpointError, Problem
from mindspeed_mm.core.hashed_file import FileRecord, is_checksum
from mindspeed_mm.core.json_file import JsonObject, read_json_object

FORMAT = "mindspeed-mm-checkpoint"
FORMAT_VERSION = 2
"""Before 2, files had a SHA-256 under that name instead of a checksum that names its hash."""


RunContext = dict[str, Any]
"""What a manifest records of the run that saved, as JSON; see `resume.check_resumable`."""


class InvalidCheckpoint(CheckpointError):
    """A checkpoint that is incomplete or damaged: an older one may still be good."""


Verification = Literal["hash", "size", "none"]


@dataclass(frozen=True)
class Manifest:
    """Content of `MANIFEST.json`: the files of a committed checkpoint, and the run that wrote it."""

    iteration: int
    world_size: int
    files: dict[str, FileRecord]
    optimizer: str | None
    """Class of the optimizer whose state is kept; None when only weights are."""
    ties: dict[str, str] = field(default_factory=dict)
    """Name of a shared parameter → the name under which it is stored."""
    dtype: str | None = None
    """Set when floating-point weights were cast for saving."""
    context: RunContext = field(default_factory=dict)
    """Mesh, configuration, data fingerprint and versions: see `resume.check_resumable`."""
    time: float = 0.0
    """Seconds since the epoch."""
    format: str = FORMAT
    format_version: int = FORMAT_VERSION

    def write(self, folder: Path) -> None:
        """Write it into a draft, last of all files, forced to the disk."""
        atomic_write_text(folder / MANIFEST, json.dumps(asdict(self), indent=1, sort_keys=True) + "\n")

    @property
    def total_bytes(self) -> int:
        """Size of all files of the checkpoint together, in bytes, without the manifest."""
        return sum(record.size for record in self.files.values())


def read_manifest(folder: Path) -> Manifest:
    """Read and check a manifest; files are not looked at.

    Raises:
        InvalidCheckpoint: It is missing or is not a manifest.
        CheckpointError: It may not be read, or comes from a newer version.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise InvalidCheckpoint(f"has no {MANIFEST}: it was interrupted, or comes from elsewhere", where=str(folder))
    try:
        content = read_json_object(path, InvalidCheckpoint, way_out="")
    except InvalidCheckpoint as error:
        if isinstance(error.__cause__, PermissionError):  # not damaged: an older one must not be taken instead
            raise CheckpointError("cannot be read: permission denied", where=str(path)) from error
        raise
    _check_format(content, path)
    try:
        files = {name: _file_record(record) for name, record in content["files"].items()}
        manifest = Manifest(**{**content, "files": files})
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidCheckpoint(f"is not a manifest: {error}", where=str(path)) from error
    _check_types(manifest, path)
    return manifest


def _file_record(record: JsonObject) -> FileRecord:
    if record.keys() == {"size", "sha256"}:  # format version 1
        return FileRecord(size=record["size"], checksum=f"sha256:{record['sha256']}")
    return FileRecord(**record)


_TYPES: Mapping[str, tuple[type, ...]] = {
    "iteration": (int,),
    "world_size": (int,),
    "optimizer": (str, NoneType),
    "ties": (dict,),
    "dtype": (str, NoneType),
    "context": (dict,),
    "time": (int, float),
}


def _check_types(manifest: Manifest, path: Path) -> None:
    """A value of the wrong kind is damage like any other: it must not surface where it is used."""
    for name, types in _TYPES.items():
        if type(value := getattr(manifest, name)) not in types:  # isinstance would take true for 1
            raise InvalidCheckpoint(f"is not a manifest: {value!r:.40} in it is mistyped", where=str(path), key=name)
    for name, record in manifest.files.items():
        if type(record.size) is not int or not is_checksum(record.checksum) or Path(name).name != name:
            raise InvalidCheckpoint(f"is not a manifest: its entry of '{name:.80}' is mistyped", where=str(path))


def _check_format(content: Mapping[str, object], path: Path) -> None:
    if content.get("format") != FORMAT or type(version := content.get("format_version")) is not int:
        raise InvalidCheckpoint("is not a manifest of a checkpoint", where=str(path))
    # No InvalidCheckpoint: it is good, and an older one must not be taken instead.
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"has format version {version}, this installation reads up to {FORMAT_VERSION}",
            where=str(path),
            key="format_version",
            way_out="Update mindspeed-mm.",
        )


def verify_files(
    folder: Path, files: Mapping[str, FileRecord], verification: Verification, *, part: int = 0, parts: int = 1
) -> list[Problem]:
    """Compare a folder with its manifest.

    Args:
        folder: The committed checkpoint.
        files: As the manifest lists them.
        verification: `hash` reads every byte, `size` looks at sizes, `none` looks at nothing.
        part: Which share of the files is hashed here; sizes are always compared in share 0.
        parts: Number of shares, usually of ranks.

    Returns:
        One finding for each file that is missing, is extra, or differs. Empty when all is well.

    Raises:
        CheckpointError: A file may not be read.
    """
    if verification == "none":
        return []
    problems = _differing_sizes(folder, files) if part == 0 else []
    if verification == "hash" and not problems:
        # Sorted, so that all ranks deal the same shares.
        for name in sorted(files)[part::parts]:
            problem = _differing_content(folder / name, files[name])
            if problem is not None:
                problems.append(problem)
    return problems


def _differing_sizes(folder: Path, files: Mapping[str, FileRecord]) -> list[Problem]:
    present = {path.name: path for path in folder.iterdir() if path.name != MANIFEST}
    problems = [
        Problem("extra file, not in the manifest", str(present[name])) for name in sorted(present.keys() - files)
    ]
    for name, record in sorted(files.items()):
        if name not in present:
            problems.append(Problem("file is missing", str(folder / name)))
        elif (size := present[name].stat().st_size) != record.size:
            problems.append(Problem(f"has {size} bytes, {record.size} were committed", str(folder / name)))
    return problems


def _differing_content(path: Path, record: FileRecord) -> Problem | None:
    try:
        found = record.checksum_now(path)
    except FileNotFoundError:
        return Problem("file is missing", str(path))
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", where=str(path)) from error
    if found == record.checksum:
        return None
    return Problem(
        f"content has changed: {_short_checksum(found)}, {_short_checksum(record.checksum)} was committed", str(path)
    )


def _short_checksum(checksum: str) -> str:
    name, _, digits = checksum.partition(":")
    return f"{name} {digits[:16]}…"
