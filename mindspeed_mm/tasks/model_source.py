"""What `infer` and `evaluate` work with: a Hugging Face folder, or a run, whose newest checkpoint is exported."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.checkpoint.recognise import recognise

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
        path: A Hugging Face folder, or a run folder. A run's newest checkpoint is exported once, into `exported/`
            inside the run, and taken from there until a newer one exists.

    Raises:
        ModelFolderError: Neither of the two.
        CheckpointError: The run has no valid checkpoint.
    """
    kind = recognise(path)
    if kind == "hf":
        return ModelSource(path)
    if kind == "run":
        return ModelSource(_exported(path), run=path)
    raise ModelFolderError(
        f"is a {kind} checkpoint", where=str(path), way_out="Convert it to a Hugging Face folder first."
    )


def _exported(run: Path) -> Path:
    """The run's newest checkpoint as a Hugging Face folder, written when it is not there yet."""
    raise NotImplementedError
