"""`conversion_manifest.json`: what a conversion wrote, by file and by tensor, and whether the disk still holds that.

A manifest is read with suspicion: it may be damaged, or written to mislead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

from mindspeed_mm.checkpoint.conversion.files import OutputFile, PtFile, SafetensorsFile, TensorRecord, read_sum
from mindspeed_mm.checkpoint.dcp_folder.writing import DcpFolder
from mindspeed_mm.checkpoint.layout import METADATA, RELEASE
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.core.errors import CheckpointError, Problem, first_problems
from mindspeed_mm.core.folder_kinds import entries_of
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.core.version import __version__
from mindspeed_mm.fsdp.utils.work_progress import WorkProgress

MANIFEST = "conversion_manifest.json"
FORMAT = "mindspeed-mm-conversion"
MB = 1_000_000

_CHANGED = "is not what was written"
_SMALL_BYTES = 16_000_000
"""Files up to this size are compared whole; of larger ones, which hold tensors, the tensors are."""
_WEIGHTS = (".safetensors", ".pt")
"""Files whose tensors are listed one by one."""

_T = TypeVar("_T")
Records = Mapping[str, Mapping[str, TensorRecord]]
"""File, relative to the folder → key in it → what was written."""


@dataclass(frozen=True)
class WrittenFile:
    """What the manifest says of one file."""

    size_bytes: int
    sha256: str | None
    """None of a large one."""

    @classmethod
    def of(cls, path: Path) -> WrittenFile:
        """The record of a file on the disk."""
        size = path.stat().st_size
        digest = None
        if size <= _SMALL_BYTES:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return cls(size, digest)

    @classmethod
    def read(cls, record: object) -> WrittenFile:
        """From a manifest. Raises `ValueError` with what is wrong with it."""
        if not isinstance(record, dict) or record.keys() != {"size_bytes", "sha256"}:
            raise ValueError("does not have size_bytes and sha256")
        size, digest = record["size_bytes"], record["sha256"]
        if type(size) is not int or size < 0 or (digest is None and size <= _SMALL_BYTES):
            raise ValueError(f"has the size {size!r:.40}, which is not a size, or needs a SHA-256")
        if digest is None:
            return cls(size, None)
        return cls(size, read_sum(digest))


def write_manifest(
    folder: Path,
    records: Records,
    *,
    sources: Sequence[Path],
    layout: Mapping[str, object],
    left_out: Mapping[str, str],
) -> None:
    """Write it into a draft.

    Args:
        folder: The draft, with all its files.
        records: Of every tensor.
        sources: What was read.
        layout: How the tensors lie.
        left_out: Source keys that were not written → why.
    """
    files = {}
    for name, found in records.items():
        files[name] = {key: asdict(record) for key, record in found.items()}
    content = {
        "format": FORMAT,
        "version": __version__,
        "sources": list(map(str, sources)),
        "layout": dict(layout),
        "left_out": dict(left_out),
        "files": files,
        "written": {name: asdict(WrittenFile.of(folder / name)) for name in _files_below(folder)},
    }
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def converted_root(path: Path) -> Path | None:
    """The folder with the manifest of what lies here, in it or in its `release/`; None where no conversion wrote it."""
    root = path.parent if path.name == RELEASE else path
    if (root / MANIFEST).is_file():
        return root
    return None


def _files_below(folder: Path) -> list[str]:
    """Every file and link below a folder, but its marker and manifest."""
    found = []
    for name in entries_of(folder):
        path = folder / name
        is_folder = path.is_dir() and not path.is_symlink()
        if name != MANIFEST and not is_folder:
            found.append(name)
    return found


def read_records(root: Path) -> dict[str, dict[str, TensorRecord]]:
    """What the manifest of a folder says of its tensors.

    Raises:
        CheckpointError: It is damaged, lists no tensor, or names something outside of the folder.
    """
    return _read_records(read_json_object(root / MANIFEST, CheckpointError), root)


def _read_records(content: Mapping[str, object], root: Path) -> dict[str, dict[str, TensorRecord]]:
    if content.get("format") != FORMAT:
        raise _no_manifest(root, f"its format is {content.get('format')!r:.40}")
    records: dict[str, dict[str, TensorRecord]] = {}
    files = _table(content, "files", root)
    for name in files:
        records[name] = {}
        found = _table(files, name, root)
        for key, record in found.items():
            try:
                records[name][key] = TensorRecord.read(record)
            except ValueError as error:
                raise _no_manifest(root, str(error), f"{name}: {key}") from error
        _check_name(name, root)
        if not found:
            raise _no_manifest(root, "lists no tensors", name)
    if not records:
        raise _no_manifest(root, "it lists no files of weights")
    return records


def _read_written(content: Mapping[str, object], records: Records, root: Path) -> dict[str, WrittenFile]:
    """What a manifest says of files, all of which it has to list."""
    written: dict[str, WrittenFile] = {}
    for name, record in _table(content, "written", root).items():
        _check_name(name, root)
        try:
            written[name] = WrittenFile.read(record)
        except ValueError as error:
            raise _no_manifest(root, str(error), name) from error
    for name in written:
        # Weights without records of their tensors would be read later, compared with nothing.
        if name.endswith(_WEIGHTS) and name not in records:
            raise _no_manifest(root, "lists no tensors", name)
    for name in records:
        if name not in written and f"{name}/{METADATA}" not in written:
            raise _no_manifest(root, "has tensors, but is not a file that was written", name)
    return written


def _table(content: Mapping[str, object], key: str, root: Path) -> dict[str, object]:
    table = content.get(key)
    if key not in content:
        raise _no_manifest(root, "is not there", key)
    if not isinstance(table, dict):
        raise _no_manifest(root, "is not a table", key)
    return table


def _check_name(name: str, root: Path) -> None:
    # A manifest comes from elsewhere: no name in it may lead out of the folder.
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or str(path) != name or name == "." or "\0" in name:
        raise _no_manifest(root, "is not a name in this folder", f"{name!r:.80}")


def _no_manifest(root: Path, why: str, key: str = "") -> CheckpointError:
    return CheckpointError(
        f"is not the manifest of a conversion: {why}",
        where=str(root / MANIFEST),
        key=key,
        way_out="Copy the folder again. To convert it as it is: --no-verify, of mm-convert --verify false.",
    )


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
                    problems.append(Problem(_CHANGED, name, key))
                if progress is not None and key in stored:
                    progress.advance(stored[key].size_bytes / MB)
            if alone:
                for key in sorted(stored.keys() - records[name].keys()):
                    problems.append(Problem("is there and was not written", name, key))
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
    content = read_json_object(root / MANIFEST, CheckpointError)
    records = _read_records(content, root)
    written = _read_written(content, records, root)
    if not (inside := _inside(records, root, folder)):
        raise _no_manifest(root, f"it lists nothing of {folder.name}/")
    found = {name for name in _files_below(root) if (root / name).is_relative_to(folder)}
    of_files = _differences_of_files(root, _inside(written, root, folder), found)
    return _compare_files(root, inside, of_files, progress)


def _differences_of_files(root: Path, written: Mapping[str, WrittenFile], found: set[str]) -> list[Problem]:
    problems = []
    for name, record in written.items():
        if name not in found:
            problems.append(Problem("is missing", name))
        elif not (root / name).is_file():
            problems.append(Problem("is not a file", name))
        elif (size := (root / name).stat().st_size) != record.size_bytes:
            problems.append(Problem(f"has {size:,} bytes, and {record.size_bytes:,} were written", name))
        elif record.sha256 is not None and WrittenFile.of(root / name) != record:
            problems.append(Problem(_CHANGED, name))
    for name in sorted(found - written.keys()):
        problems.append(Problem("is there and was not written", name))
    return problems


def check_source(folder: Path) -> None:
    """`check_converted` of a folder that is converted again, if a conversion wrote it. Files that are not there any
    more are left to whoever reads them."""
    root = converted_root(folder)
    if root is not None:
        _compare_files(root, _present(root, folder), [], None)


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
    records = _part_of_records(_present(root, folder), part, parts)
    return differences(root, records, _kinds_of(root, records), alone=False)


def _present(root: Path, folder: Path) -> Records:
    inside = _inside(read_records(root), root, folder)
    return {name: found for name, found in inside.items() if (root / name).exists()}


def _part_of_records(records: Records, part: int, parts: int) -> Records:
    """Tensors that begin in the part of all bytes: neighbours, so that few files are opened."""
    total = max(1, sum(_sizes(records)))
    held: dict[str, dict[str, TensorRecord]] = {}
    position = 0
    for name, found in records.items():
        for key, record in found.items():
            # Empty tensors at the very end begin behind the last byte: they belong to the last share.
            if min(position, total - 1) * parts // total == part:
                held.setdefault(name, {})[key] = record
            position += record.size_bytes
    return held


def _sizes(records: Records) -> Iterator[int]:
    """Yield the size in bytes of every tensor of every file."""
    for found in records.values():
        for record in found.values():
            yield record.size_bytes


def _inside(records: Mapping[str, _T], root: Path, folder: Path) -> dict[str, _T]:
    return {name: found for name, found in records.items() if (root / name).is_relative_to(folder)}


def _compare_files(
    root: Path, records: Records, problems: list[Problem], progress: WorkProgress | None
) -> tuple[int, int]:
    """The tensors of a file that was changed are named instead of the file, where they show the change."""
    sizes = list(_sizes(records))
    if progress is not None:
        progress.begin(sum(sizes) / MB)
    of_tensors = differences(root, records, _kinds_of(root, records), progress, alone=False)
    if progress is not None:
        progress.end()
    # The slash makes this a comparison of whole names, and covers the files below a distributed checkpoint.
    shown_by_tensors = tuple(f"{problem.where}/" for problem in of_tensors)
    all_problems = list(of_tensors)
    for problem in problems:
        if problem.what != _CHANGED or not f"{problem.where}/".startswith(shown_by_tensors):
            all_problems.append(problem)
    if all_problems:
        raise CheckpointError(
            f"{root}: {len(all_problems)} of what {MANIFEST} lists is not as it was written. Copy the folder again. To "
            "convert it as it is: --no-verify, of mm-convert --verify false.",
            problems=first_problems(all_problems),
        )
    return len(sizes), sum(sizes)


def _kinds_of(root: Path, records: Records) -> dict[str, OutputFile]:
    kinds: dict[str, OutputFile] = {}
    for name, found in records.items():
        if (root / name).exists():
            kinds[name] = _kind_of(root / name, found)
    return kinds


def _kind_of(path: Path, records: Mapping[str, TensorRecord]) -> OutputFile:
    """A file of this kind without content, to open what is there."""
    if path.suffix == ".safetensors":
        return SafetensorsFile({})
    if path.suffix == ".pt":
        sections: dict[str, dict[str, LazyTensor]] = {}
        for key in records:
            section, slash, _ = key.partition("/")
            sections[section if slash else ""] = {}
        return PtFile(sections)
    return DcpFolder({})
