"""What `infer` and `evaluate` work with: a Hugging Face folder, or a run, whose newest checkpoint is exported."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.core.artifacts import sha256_file
from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.checkpoint import layout
from mindspeed_mm.fsdp.checkpoint.committed import open_checkpoint
from mindspeed_mm.fsdp.checkpoint.ranks import Ranks
from mindspeed_mm.fsdp.checkpoint.recognise import recognise
from mindspeed_mm.tasks import export

FOLDER_FILES = ("*.safetensors", "*.json", "*.jinja")
EXPORTED = "exported"


@dataclass(frozen=True)
class ModelSource:
    """A model folder, and the run that it came from, if any."""

    folder: Path
    run: Path | None = None

    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that change when the folder's files do (names, sizes, times of change)."""
        files = sorted(path for pattern in FOLDER_FILES for path in self.folder.glob(pattern))
        facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def resolve_model(path: Path) -> ModelSource:
    """The model folder that `path` names.

    Args:
        path: A Hugging Face folder, a run folder, or one `iter_*` folder of a run. A checkpoint is exported once, into
            `exported/` inside the run, and taken from there afterwards; of a run it is the newest good one.

    Raises:
        CheckpointError: Neither of these, or the run has no valid checkpoint.
        ModelFolderError: A checkpoint of another framework.
    """
    kind = recognise(path)
    if kind == "hf":
        return ModelSource(path)
    if kind == "megatron":
        raise ModelFolderError(
            "is a Megatron checkpoint", where=str(path), way_out="Convert it to a Hugging Face folder first."
        )
    run = path if kind == "run" else path.absolute().parent
    return ModelSource(_exported(path, run), run)


def _exported(source: Path, run: Path) -> Path:
    """The Hugging Face folder of a checkpoint, named after its step and content; written when it is not there yet."""
    checkpoint = open_checkpoint(source, Ranks(), "size").path
    mark = next(path for name in (layout.MANIFEST, layout.METADATA) if (path := checkpoint / name).exists())
    target = run / EXPORTED / f"{checkpoint.name}-{sha256_file(mark)[:12]}"
    if not target.is_dir():
        export.run(checkpoint, target)
        _remove_others(target)
    return target


def _remove_others(target: Path) -> None:
    """One export of a run is kept: each is as large as the model."""
    for folder in target.parent.glob("iter_*"):
        if folder != target and not folder.name.endswith(".tmp"):
            shutil.rmtree(folder)
