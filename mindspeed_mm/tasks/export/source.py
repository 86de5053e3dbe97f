"""Finds what an export starts from: the checkpoint, its run, and the model folder that the run started from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mindspeed_mm.checkpoint.choice import Which, choose_checkpoint
from mindspeed_mm.core.artifacts import RunFolder
from mindspeed_mm.core.errors import CheckpointError, ModelFolderError, UsageError
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.core.model_kinds import ModelKind, kind_of_folder
from mindspeed_mm.fsdp.checkpoint.committed import CommittedCheckpoint, open_checkpoint
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.utils.ranks import Ranks

NAME_MODEL = "Name the folder with its config.json and tokenizer: --model FOLDER."


@dataclass(frozen=True)
class ExportSource:
    """What is exported, and where the rest of a model folder comes from."""

    checkpoint: CommittedCheckpoint
    run: RunFolder | None
    """None for a checkpoint outside a run folder."""
    model_folder: Path
    """Configuration, tokenizer, processor, components; its weights say which dtype and layout to write."""
    is_told: bool = False
    """Whether a person named the model folder, instead of the run."""
    why: str = ""
    """Why this checkpoint of the run was taken, as `Choice` says it."""

    @property
    def kind(self) -> ModelKind:
        """The kind of the model that was trained."""
        return kind_of_folder(self.model_folder)

    @cached_property
    def arguments(self) -> Arguments | None:
        """The run's configuration, as it was resolved; None when it was not kept."""
        if self.run is None or not self.run.resolved.exists():
            return None
        return load_with_plugins(self.run.resolved).arguments


def resolve_source(source: Path, step: Which, model_folder: Path | None) -> ExportSource:
    """Find and verify the checkpoint, and the folder that the run started from.

    Args:
        source: A run folder, or one checkpoint.
        step: Which of the run's checkpoints: a step, `best` or `newest`; None takes the best that the run keeps, else
            the newest good one.
        model_folder: Instead of the folder that the run names.

    Raises:
        CheckpointError: The checkpoint is damaged or absent.
        ModelFolderError: The model that the run started from is gone.
        UsageError: Nothing says which model the checkpoint holds.
    """
    chosen = choose_checkpoint(source, step)
    checkpoint = open_checkpoint(chosen.path, Ranks(), "hash")
    run_path = next((p for p in (source, checkpoint.path.parent) if (p / "run.json").exists()), None)
    folder = RunFolder(run_path) if run_path else None
    if model_folder is not None:
        return ExportSource(checkpoint, folder, model_folder, is_told=True, why=chosen.why)
    return ExportSource(checkpoint, folder, _started_from(checkpoint, folder), why=chosen.why)


def noted_model(run: Path) -> Path | None:
    """The model folder that a run's record names; None when it names none.

    Raises:
        CheckpointError: The record names something else than a folder.
    """
    record = RunFolder(run).run_json
    if not record.exists():
        return None
    name = read_json_object(record, CheckpointError, way_out=NAME_MODEL).get("model_name_or_path")
    if name is not None and not isinstance(name, str):
        raise CheckpointError(
            f"{name!r:.80} is not a folder", where=str(record), key="model_name_or_path", way_out=NAME_MODEL
        )
    if name is not None:
        return Path(name)
    return None


def unnamed_model(where: Path, way_out: str) -> UsageError:
    """What is said of a checkpoint, a converted one or one whose run kept no record, that needs its model's folder."""
    return UsageError("does not say which model it holds", where=str(where), way_out=way_out)


def _started_from(checkpoint: CommittedCheckpoint, folder: RunFolder | None) -> Path:
    found = None
    place = checkpoint.path
    if folder is not None:
        found = noted_model(folder.path)
        place = folder.run_json
    if found is None:
        raise unnamed_model(place, NAME_MODEL)
    if not found.is_dir():
        raise ModelFolderError(
            "the folder that the run started from no longer exists",
            where=str(found),
            way_out="Name another with the same config.json and tokenizer: --model FOLDER.",
        )
    return found
