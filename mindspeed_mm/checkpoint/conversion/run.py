"""Runs a conversion: every promise about the output folder is kept here, whatever the layouts are.

with open_weights(source) as stored:
    ledger = SourceLedger(stored, source)
    files = {"model.safetensors": SafetensorsFile(my_map(ledger.tensors))}
    convert(Conversion([source], [ledger], files, layout={"kind": "hf"}), target)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Literal, TextIO

import torch

from mindspeed_mm.checkpoint.conversion.files import OutputFile, SafetensorsFile, TensorRecord
from mindspeed_mm.checkpoint.conversion.ledger import SourceLedger, check_ledgers
from mindspeed_mm.checkpoint.conversion.manifest import MB, check_source, differences, write_manifest
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.core.artifacts import free_bytes, is_disk_full
from mindspeed_mm.core.errors import CheckpointError, ConfigError, MachineError, ModelFolderError, Problem, first_names
from mindspeed_mm.core.folder_writing import atomic_folder, backup_of, check_target, copy_plain, folder_in_place
from mindspeed_mm.fsdp.utils.finite import is_finite
from mindspeed_mm.fsdp.utils.work_progress import WorkProgress

_MAPPINGS = {
    "files": '{"model.safetensors": SafetensorsFile(tensors)}',
    "layout": '{"kind": "hf"}',
    "times": '{"embed": 2}, the source\'s key',
    "left_out": '{"rotary.inv_freq": "is computed"}, the source\'s key and the reason',
    "copies": '{"tokenizer.json": source / "tokenizer.json"}',
    "texts": '{"config.json": json.dumps(config)}',
}
"""Arguments of `Conversion` that are mappings → an example of each."""


@dataclass(frozen=True)
class Conversion:
    """What is to be written, and from what."""

    sources: Sequence[Path]
    """Folders and files that are read meanwhile: the target may neither be one of them, nor hold or lie in one."""
    ledgers: Sequence[SourceLedger]
    """Of the sources' tensors. Every element is used exactly once, but for `times`, `left_out` and `dropped`."""
    files: Mapping[str, OutputFile]
    """Relative name → content."""
    layout: Mapping[str, object]
    """What the manifest says about how the tensors lie; plain JSON values."""
    times: Mapping[str, int | None] = field(default_factory=dict)
    """Source keys that are written whole several times (a norm on every rank, a tied embedding) → how often; None: as
    often as it takes."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Source keys that are not written, each with the reason. What else a source holds is in its ledger's `beside`."""
    dropped: Sequence[LazyTensor] = ()
    """Parts of the sources that are not written, by a rule: rows that fill a vocabulary up, say."""
    incomparable: str = ""
    """Why source and output do not compute the same logits, where they do not: a part of the model alone, say."""
    copies: Mapping[str, Path] = field(default_factory=dict)
    """Relative name → file or folder to copy."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Relative name → text to write: configurations, indices, trackers."""

    def __post_init__(self) -> None:
        """Check that what is named goes by its name: converters come from outside, too.

        Raises:
            ConfigError: An argument is not of its kind; with an example of one that is.
        """
        for name, example in _MAPPINGS.items():
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"is a {type(value).__name__}, and should be a mapping of names",
                    where="Conversion",
                    key=name,
                    way_out=f"Give one such as {example}.",
                )

    @property
    def size_bytes(self) -> int:
        """Of all that will be written, small texts left out."""
        copied = sum(map(_size_of, self.copies.values()))
        return copied + sum(file.size_bytes for file in self.files.values())

    @property
    def not_written(self) -> dict[str, str]:
        """What the sources hold and the output does not → why; without keys of `left_out` that no source has."""
        found: dict[str, str] = {}
        for ledger in self.ledgers:
            found |= {key: self.left_out[key] for key in ledger.tensors if key in self.left_out}
            found |= ledger.beside
        return found


@dataclass(frozen=True)
class Converted:
    """Result of a conversion: the folder, how much was written, and how long it took."""

    folder: Path
    tensors: int
    size_bytes: int
    write_s: float
    verify_s: float
    """Zero when it was not asked for."""
    backup: Path | None = None
    """Where the original of a conversion in place is kept."""
    logits: str = ""
    """What the comparison of logits found, or why there was none; empty where nobody asked for it."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Key of a source that was not written → why."""
    not_finite: Sequence[str] = ()
    """Keys of written tensors that hold NaN or infinity."""

    def lines(self, source: str = "") -> list[str]:
        """For a person: what was written, after what it was made from, where the original is, and what was compared."""
        parts = [f"{self.tensors:,} tensors", f"{self.size_bytes / 2**20:,.1f} MiB"]
        if source:
            parts.append(source)
        parts.append(f"written in {self.write_s:.1f} s")
        if self.verify_s:
            parts.append(f"verified in {self.verify_s:.1f} s")
        else:
            parts.append("not verified")
        lines = [f"{self.folder}: {', '.join(parts)}"]
        reasons: dict[str, list[str]] = {}
        for key, why in self.left_out.items():
            reasons.setdefault(why, []).append(key)
        for why, keys in reasons.items():
            lines.append(f"not written: {first_names(keys)} ({why})")
        if self.not_finite:
            what = f"warning: NaN or infinity in {first_names(self.not_finite)}"
            lines.append(f"{what}. Convert an undamaged copy or an earlier checkpoint")
        if self.backup:
            lines.append(f"the original is kept as {self.backup}")
        if self.logits:
            lines.append(self.logits)
        return lines


Verify = bool | Literal["full"]
"""Whether what was written is read back and compared; `full`: the logits of large models too."""
Examine = Callable[[Conversion, Path, bool], str]
"""(conversion, what was written, of models of any size) → what was found. Raises where something is wrong."""


@dataclass(frozen=True)
class Writing:
    """How an output folder is written."""

    overwrite: bool = False
    """Replace what a command of ours has written there."""
    verify: Verify = True
    """Compare sources that an earlier conversion wrote with their manifest; read everything back and compare keys,
    shapes and checksums before the folder gets its name."""
    examine: Examine | None = None
    """Looks at what was written, if that is verified, before the folder gets its name."""
    allow_unused: bool = False
    """Leave out stored tensors that the model has no place for, and name them; else they are an error."""


_VERIFIED = Writing()


def convert(
    conversion: Conversion,
    target: Path,
    writing: Writing = _VERIFIED,
    *,
    in_place: bool = False,
    keep_backup: bool = True,
    stream: TextIO | None = None,
) -> Converted:
    """Write the output folder. It appears when it is complete and verified, or not at all.

    Args:
        conversion: What is written.
        target: The folder.
        writing: How.
        in_place: The target is the source: the new folder is built beside it and takes its place.
        keep_backup: With `in_place`, keep the original as `<name>.bak`.
        stream: Where progress is shown; None shows none.

    Raises:
        ModelFolderError: A stored tensor would be lost, or used more often than the layout says.
        UsageError: The target is none that may be written.
        MachineError: There is not enough room, or the target cannot be written.
        CheckpointError: A source is not as it was written, or what was written does not read back as it should.
    """
    if not in_place:
        check_target(target, overwrite=writing.overwrite, sources=conversion.sources)
    # What can be refused is refused before anything is written: conversions take up to hours.
    check_complete(conversion)
    check_space(conversion, target)
    progress = None
    if stream is not None:
        progress = WorkProgress("MB", stream)
    if writing.verify:
        for source in set(conversion.sources):
            check_source(source)
    began = time.monotonic()
    with (
        _explained_disk_failure(target, conversion),
        _folder(conversion, target, writing.overwrite, in_place, keep_backup) as draft,
    ):
        # Into a draft beside the target, which gets its name where the block ends without an error.
        records, not_finite = _write(conversion, draft, progress)
        written = time.monotonic()
        logits, verify_s = "", 0.0
        if writing.verify:
            _verify(conversion, draft, records, progress)
            if writing.examine is not None:
                logits = writing.examine(conversion, draft, writing.verify == "full")
            verify_s = time.monotonic() - written
    tensors = sum(len(file.tensors) for file in conversion.files.values())
    backup = backup_of(target) if in_place and keep_backup else None
    write_s = written - began
    not_written, size_bytes = conversion.not_written, conversion.size_bytes
    return Converted(target, tensors, size_bytes, write_s, verify_s, backup, logits, not_written, not_finite)


def check_complete(conversion: Conversion) -> None:
    """The ledger, before anything is read: every stored element is used as often as the conversion says, every element
    of the output written once, and no key into two safetensors files.

    Raises:
        ModelFolderError: Naming the keys.
    """
    check_ledgers(
        conversion.ledgers,
        chain.from_iterable(file.tensors.items() for file in conversion.files.values()),
        times=conversion.times,
        left_out=conversion.left_out,
        dropped=conversion.dropped,
    )
    # Shards of one folder share their keys; the same key in another folder is another tensor.
    homes: dict[str, str] = {}
    problems = []
    for name, file in conversion.files.items():
        if not isinstance(file, SafetensorsFile):
            continue
        for key in file.tensors:
            first = homes.setdefault(f"{Path(name).parent}/{key}", name)
            if first != name:
                problems.append(Problem(f"is written into {first} and {name}", key=key))
    if problems:
        raise ModelFolderError("the conversion writes a tensor twice", problems=problems[:5])


def check_space(conversion: Conversion, target: Path) -> None:
    """Raise `MachineError` when the output cannot fit where it is to be written."""
    if (free := free_bytes(target.parent)) < (needed := conversion.size_bytes):
        raise MachineError(
            f"{needed:,} bytes are needed, but only {free:,} are free",
            where=str(target),
            way_out="Make room, or choose a folder on another disk.",
        )


def _folder(
    conversion: Conversion, target: Path, overwrite: bool, in_place: bool, keep_backup: bool
) -> AbstractContextManager[Path]:
    if in_place:
        return folder_in_place(target, keep=keep_backup)
    return atomic_folder(target, overwrite=overwrite, sources=conversion.sources)


def _write(
    conversion: Conversion, draft: Path, progress: WorkProgress | None
) -> tuple[dict[str, dict[str, TensorRecord]], list[str]]:
    """Everything into the draft; what each tensor is, by file and key, and the keys of tensors that are not finite."""
    if progress is not None:
        progress.begin(conversion.size_bytes / MB)
    records: dict[str, dict[str, TensorRecord]] = {}
    not_finite: list[str] = []
    for name, source in conversion.copies.items():
        copy_plain(source, _place(draft, name))
    for name, text in conversion.texts.items():
        _place(draft, name).write_text(text, encoding="utf-8")
    for name, file in conversion.files.items():
        found = records[name] = {}

        # `found` is bound here: a closure would note into the table of the last file.
        def note(key: str, tensor: torch.Tensor, found: dict[str, TensorRecord] = found) -> None:
            found[key] = TensorRecord.of(tensor)
            if not is_finite(tensor):
                not_finite.append(key)
            if progress is not None:
                progress.advance(tensor.nbytes / MB)

        file.write(_place(draft, name), note)
    if progress is not None:
        progress.end()
    not_written = conversion.not_written
    write_manifest(draft, records, sources=conversion.sources, layout=conversion.layout, left_out=not_written)
    return records, not_finite


def _verify(
    conversion: Conversion,
    draft: Path,
    records: Mapping[str, Mapping[str, TensorRecord]],
    progress: WorkProgress | None,
) -> None:
    """Read back what was written and compare keys, shapes and checksums."""
    if progress is not None:
        progress.begin(conversion.size_bytes / MB)
    problems = differences(draft, records, conversion.files, progress)
    if progress is not None:
        progress.end()
    if problems:
        raise CheckpointError(
            "what was written does not read back. Check the disk; nothing was left behind:", problems=problems[:5]
        )


@contextmanager
def _explained_disk_failure(target: Path, conversion: Conversion) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise MachineError(
            f"the disk is full: {conversion.size_bytes:,} bytes are needed",
            where=str(target),
            way_out="Make room, or choose a folder on another disk. Nothing was left behind.",
        ) from error


def _place(draft: Path, name: str) -> Path:
    path = draft / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _size_of(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
