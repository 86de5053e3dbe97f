"""`conversion_manifest.json`: what a conversion wrote, tensor by tensor, and whether the disk still holds that."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mindspeed_mm.checkpoint.conversion.files import OutputFile, PtFile, SafetensorsFile, TensorRecord
from mindspeed_mm.checkpoint.dcp_folder.writing import DcpFolder
from mindspeed_mm.checkpoint.layout import RELEASE
from mindspeed_mm.core.errors import CheckpointError, Problem
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.core.version import __version__
from mindspeed_mm.fsdp.utils.work_progress import WorkProgress

MANIFEST = "conversion_manifest.json"
FORMAT = "mindspeed-mm-conversion"
MB = 1_000_000
_SHOWN = 5

Records = Mapping[str, Mapping[str, TensorRecord]]
"""File, relative to the folder → key in it → what was written."""


def write_manifest(
    folder: Path, records: Records, *, sources: Sequence[Path], layout: Mapping[str, Any], left_out: Mapping[str, str]
) -> None:
    """Write it into a draft.

    Args:
        folder: The draft.
        records: Of every tensor.
        sources: What was read.
        layout: How the tensors lie.
        left_out: Source keys that were not written → why.
    """
    content = {
        "format": FORMAT,
        "version": __version__,
        "sources": [str(path) for path in sources],
        "layout": dict(layout),
        "left_out": dict(left_out),
        "files": {name: {key: asdict(record) for key, record in found.items()} for name, found in records.items()},
    }
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def converted_root(path: Path) -> Path | None:
    """The folder with the manifest of what lies here, in it or in its `release/`; None where no conversion wrote it."""
    root = path.parent if path.name == RELEASE else path
    return root if (root / MANIFEST).is_file() else None


def read_records(root: Path) -> dict[str, dict[str, TensorRecord]]:
    """What the manifest of a folder says of its tensors.

    Raises:
        CheckpointError: It is damaged.
    """
    content = read_json_object(root / MANIFEST, CheckpointError)
    try:
        return {
            name: {
                key: TensorRecord(record["dtype"], tuple(record["shape"]), record["sha256"])
                for key, record in records.items()
            }
            for name, records in content["files"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"is no manifest of a conversion: {error}", where=str(root / MANIFEST), way_out="Copy the folder again."
        ) from error


def differences(
    folder: Path,
    records: Records,
    files: Mapping[str, OutputFile],
    progress: WorkProgress | None = None,
    *,
    alone: bool = True,
) -> list[Problem]:
    """Read what was written and compare keys, types, shapes and checksums.

    Args:
        folder: What was written.
        records: What each tensor was.
        files: How to open each file.
        progress: Is told what was read, in MB.
        alone: Nothing else may be there.
    """
    problems = []
    for name, file in files.items():
        with file.open_written(folder / name) as stored:
            for key, record in records[name].items():
                if key not in stored:
                    problems.append(Problem("is missing", name, key))
                elif TensorRecord.of(stored[key].read()) != record:
                    problems.append(Problem("is not what was written", name, key))
                if progress is not None and key in stored:
                    progress.advance(stored[key].size_bytes / MB)
            surplus = sorted(stored.keys() - records[name].keys()) if alone else ()
            problems += [Problem("is there and was not written", name, key) for key in surplus]
    return problems


def check_converted(folder: Path, progress: WorkProgress | None = None) -> tuple[int, int]:
    """Compare a folder that a conversion wrote with the checksums that it left there.

    Args:
        folder: It, or its `release/`, which is then compared alone.
        progress: Is told what was read, in MB.

    Returns:
        Numbers of tensors and bytes, all as they were written.

    Raises:
        CheckpointError: There is no manifest; or a tensor is missing or another one, with its file and key.
    """
    root = converted_root(folder)
    if root is None:
        what = f"has no {MANIFEST}: no conversion wrote it, or the file was not copied with it"
        raise CheckpointError(what, where=str(folder))
    records = _records_in(root, folder)
    missing = [Problem("is missing", name) for name in records if not (root / name).exists()]
    return _compare(root, records, missing, progress)


def check_source(folder: Path) -> None:
    """`check_converted` of a folder that is converted again, if a conversion wrote it. Files that are not there any
    more are left to whoever reads them."""
    root = converted_root(folder)
    if root is not None:
        _compare(root, _present(root, folder), [], None)


def differences_of_share(folder: Path, part: int, parts: int) -> list[Problem]:
    """What of a folder that a conversion wrote is not as it was written; nothing where no conversion did. Files that
    are not there any more are left to whoever reads them.

    Args:
        folder: It, or its `release/`.
        part: Which share of the bytes is read, from 0.
        parts: How many shares there are.
    """
    root = converted_root(folder)
    if root is None:
        return []
    records = _share(_present(root, folder), part, parts)
    return differences(root, records, _kinds_of(root, records), alone=False)


def _present(root: Path, folder: Path) -> Records:
    return {name: found for name, found in _records_in(root, folder).items() if (root / name).exists()}


def _share(records: Records, part: int, parts: int) -> Records:
    """Tensors that begin in the part of all bytes: neighbours, so that few files are opened."""
    total = max(1, sum(record.size_bytes for found in records.values() for record in found.values()))
    held: dict[str, dict[str, TensorRecord]] = {}
    position = 0
    for name, found in records.items():
        for key, record in found.items():
            if min(position, total - 1) * parts // total == part:
                held.setdefault(name, {})[key] = record
            position += record.size_bytes
    return held


def _records_in(root: Path, folder: Path) -> dict[str, dict[str, TensorRecord]]:
    return {name: found for name, found in read_records(root).items() if (root / name).is_relative_to(folder)}


def _compare(root: Path, records: Records, problems: list[Problem], progress: WorkProgress | None) -> tuple[int, int]:
    sizes = [record.size_bytes for found in records.values() for record in found.values()]
    if progress is not None:
        progress.begin(sum(sizes) / MB)
    problems = [*problems, *differences(root, records, _kinds_of(root, records), progress, alone=False)]
    if progress is not None:
        progress.end()
    if problems:
        more = [Problem(f"and {len(problems) - _SHOWN:,} more")] if len(problems) > _SHOWN else []
        raise CheckpointError(
            f"{root}: {len(problems)} of what {MANIFEST} lists is not as it was written. Copy the folder again. To "
            "convert it as it is: --no-verify, of mm-convert --verify false.",
            problems=problems[:_SHOWN] + more,
        )
    return len(sizes), sum(sizes)


def _kinds_of(root: Path, records: Records) -> dict[str, OutputFile]:
    return {name: _kind_of(root / name, found) for name, found in records.items() if (root / name).exists()}


def _kind_of(path: Path, records: Mapping[str, TensorRecord]) -> OutputFile:
    """A file of this kind without content, to open what is there."""
    if path.suffix == ".safetensors":
        return SafetensorsFile({})
    if path.suffix == ".pt":
        return PtFile({key.partition("/")[0] if "/" in key else "": {} for key in records})
    return DcpFolder({})
