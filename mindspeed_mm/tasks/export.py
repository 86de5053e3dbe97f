"""`mm export`: a run's checkpoint as a Hugging Face folder, streamed tensor by tensor in one process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.checkpoint.keymap import natural_order
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.core.artifacts import RunFolder, atomic_folder, free_bytes
from mindspeed_mm.core.errors import CheckpointError, MachineError, ModelFolderError, Problem
from mindspeed_mm.fsdp.checkpoint import layout
from mindspeed_mm.fsdp.checkpoint.committed import CommittedCheckpoint, open_checkpoint
from mindspeed_mm.fsdp.checkpoint.dcp_tensors import DcpTensors
from mindspeed_mm.fsdp.checkpoint.hf import hub_tensors, remember_layout
from mindspeed_mm.fsdp.checkpoint.hf_folder import (
    MAX_SHARD_BYTES,
    DtypeRule,
    copy_assets,
    write_weights,
)
from mindspeed_mm.fsdp.checkpoint.ranks import Ranks
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype
from mindspeed_mm.tasks.model_card import write_model_card
from mindspeed_mm.tasks.train import load_with_plugins


@dataclass(frozen=True)
class Exported:
    """What was written."""

    folder: Path
    checkpoint: Path
    step: int | None
    tensors: int
    size_bytes: int
    """Of the weights."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ExportSource:
    """What is exported, and where the rest of a model folder comes from."""

    checkpoint: CommittedCheckpoint
    run: RunFolder | None
    """None for a checkpoint outside a run folder."""
    model_folder: Path
    """Configuration, tokenizer, processor; its weights say which dtype and layout to write."""


def run(
    source: Path,
    target: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    model_folder: Path | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Exported:
    """Export a checkpoint. The folder appears when it is complete; memory holds one file of it at a time.

    Args:
        source: A run folder (its newest good checkpoint), or one checkpoint.
        target: The folder to write.
        step: Which of the run's checkpoints.
        dtype: `bf16`, `fp16`, `fp32`, `fp64`; None writes each tensor as the model that the run started from has it.
        model_folder: Where configuration, tokenizer and processor come from; None takes what the run started from.
        overwrite: Replace an existing target.
        max_shard_bytes: Largest size of one weights file, unless a single tensor is larger.

    Raises:
        CheckpointError: The checkpoint is damaged, absent or of another model.
        ModelFolderError: The model folder is gone or does not fit.
        UsageError: The target exists.
        MachineError: The target cannot be written.
    """
    found = resolve_source(source, step, model_folder)
    tensors = _hub_layout(found)
    rule = DtypeRule.of_source(found.model_folder, torch_dtype(dtype))
    size_bytes = sum(torch.Size(t.shape).numel() * rule(key, t.dtype).itemsize for key, t in tensors.items())
    with atomic_folder(target, overwrite=overwrite) as draft:
        if (free := free_bytes(draft)) < size_bytes:
            raise MachineError(f"{size_bytes:,} bytes are needed, {free:,} are free", where=str(target))
        copy_assets(found.model_folder, draft, torch_dtype(dtype))
        write_weights(tensors, draft, rule, max_shard_bytes)
        write_model_card(draft, found.run, found.checkpoint.iteration, found.model_folder, title=target.name)
    return Exported(
        target, found.checkpoint.path, found.checkpoint.iteration, len(tensors), size_bytes, found.checkpoint.notes
    )


def resolve_source(source: Path, step: int | None, model_folder: Path | None) -> ExportSource:
    """Find and verify the checkpoint, and the folder that the run started from."""
    path = source
    if step is not None:
        path = layout.checkpoint_folder(source, step)
        if not path.is_dir():
            steps = ", ".join(map(str, layout.list_iterations(source))) or "none"
            raise CheckpointError(f"has no step {step}", where=str(source), way_out=f"Steps here: {steps}.")
    checkpoint = open_checkpoint(path, Ranks(), "hash")
    run_path = next((p for p in (source, checkpoint.path.parent) if (p / "run.json").exists()), None)
    folder = RunFolder(run_path) if run_path else None
    return ExportSource(checkpoint, folder, model_folder or _started_from(checkpoint, folder))


def _started_from(checkpoint: CommittedCheckpoint, folder: RunFolder | None) -> Path:
    name = json.loads(folder.run_json.read_text()).get("model_name_or_path") if folder else None
    if name is None:
        raise CheckpointError(
            "does not say which model it was trained from",
            where=str(checkpoint.path),
            way_out="Name the folder with its config.json and tokenizer: --model FOLDER.",
        )
    if not Path(name).is_dir():
        raise ModelFolderError(
            "the folder that the run started from is gone",
            where=name,
            way_out="Name another with the same config.json and tokenizer: --model FOLDER.",
        )
    return Path(name)


def _hub_layout(source: ExportSource) -> dict[str, LazyTensor]:
    """The checkpoint's tensors under the keys of the folder that the run started from, compared with the model."""
    model = ModelHub.build(_model_arguments(source))
    reader = DcpTensors(source.checkpoint)
    stored = reader.matched_to(model)
    expected = remember_layout(model, source.model_folder)
    tensors = hub_tensors(model, stored)
    if lacking := sorted(expected - tensors.keys(), key=natural_order):
        raise ModelFolderError(
            f"{len(lacking)} of the weights in {source.model_folder} would be missing from the export. Among them:",
            problems=[Problem("is not made", key=key) for key in lacking[:5]],
        )
    return tensors


def _model_arguments(source: ExportSource) -> ModelArguments:
    """The `model` section of the run, changed so that only the outline of the model is built, on any machine."""
    changes: dict[str, Any] = {
        "model_name_or_path": str(source.model_folder),
        "attn_implementation": "eager",
        "train_from_scratch": True,
        "freeze": [],
    }
    if source.run is None or not source.run.resolved.exists():
        return ModelArguments.model_validate(changes)
    return load_with_plugins(source.run.resolved).arguments.model.model_copy(update=changes)
