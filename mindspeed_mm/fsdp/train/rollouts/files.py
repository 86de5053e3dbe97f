"""Rollouts as files, from which a run that was killed goes on: `rollouts/rollout_0000012.jsonl`.

The first line tells what drew the samples, and has a checksum of everything else; each further line is a sample of some
rank, in the order of the step: another number of ranks reads the same file. Until its samples are judged, each rank
keeps its own in a file of the same form, `rollouts/drawn_0000012_0.jsonl`: a reward that fails loses none of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.core.artifacts import atomic_write_text
from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.core.json_file import JsonMapping, parse_json

FOLDER = "rollouts"
_CHECKSUM = "sha256"


@dataclass(frozen=True)
class StoredRollout:
    """A rollout of all ranks."""

    header: JsonMapping
    samples: Sequence[JsonMapping]
    digest: str
    """Of the file."""


def rollout_file(folder: Path, number: int) -> Path:
    """Where a rollout of a run stands."""
    return folder / FOLDER / f"rollout_{number:07}.jsonl"


def drawn_file(folder: Path, number: int, data_rank: int) -> Path:
    """Where the samples of a rank wait for their rewards."""
    return folder / FOLDER / f"drawn_{number:07}_{data_rank}.jsonl"


def digest_of(text: str) -> str:
    """What a checkpoint remembers of a file."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def text_of(header: Mapping[str, object], samples: Sequence[Mapping[str, object]]) -> str:
    """The content of a file; numbers as they are, to the last bit."""
    body = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in samples)
    return json.dumps({**header, _CHECKSUM: _rollout_checksum(header, body)}) + "\n" + body


def _rollout_checksum(header: Mapping[str, object], body: str) -> str:
    return digest_of(json.dumps(header, sort_keys=True) + body)


def write_rollout(folder: Path, number: int, text: str) -> None:
    """Write the file of a rollout; see `write_samples`."""
    write_samples(rollout_file(folder, number), text)


def write_samples(path: Path, text: str) -> None:
    """Write a file; it appears when it is whole.

    Raises:
        MachineError: The disk is full, or the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, text)
    except OSError as error:
        raise MachineError(
            f"the samples of a rollout cannot be written: {error.strerror or error}",
            where=str(path),
            key="posttrain.rollout.keep",
            way_out="Make room and start the run again, which goes on from its last checkpoint; with keep: false only "
            "the samples that a resume needs are kept.",
        ) from error


def read_rollout(folder: Path, number: int) -> StoredRollout | None:
    """The rollout of this number; None where there is none, or what is there is broken."""
    return read_samples(rollout_file(folder, number))


def read_samples(path: Path) -> StoredRollout | None:
    """What a file holds; None where there is none, or it is broken."""
    try:
        text = path.read_text(encoding="utf-8")
        first, _, body = text.partition("\n")
        header, samples = parse_json(first), [parse_json(line) for line in body.split("\n") if line]
    except (OSError, ValueError):
        return None
    if not isinstance(header, dict) or header.pop(_CHECKSUM, None) != _rollout_checksum(header, body):
        return None
    return StoredRollout(header, samples, digest_of(text))


def remove_drawn(folder: Path) -> None:
    """Remove the samples that waited for their rewards."""
    for path in (folder / FOLDER).glob("drawn_*.jsonl"):
        path.unlink(missing_ok=True)


def remove_rollouts_before(folder: Path, number: int) -> None:
    """Remove the files of earlier rollouts."""
    for path in sorted((folder / FOLDER).glob("rollout_*.jsonl")):
        if path.stem < rollout_file(folder, number).stem:
            path.unlink(missing_ok=True)
