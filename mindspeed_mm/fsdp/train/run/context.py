"""What a checkpoint's manifest records of a run, and what a resume compares."""

from __future__ import annotations

from pathlib import Path

import torch

from mindspeed_mm.core.version import __version__
from mindspeed_mm.fsdp.checkpoint.base_weights import base_weights_mark, weights_folder_of_load
from mindspeed_mm.fsdp.checkpoint.manifest import RunContext
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.params.loader import ResolvedConfig, resolved_dict
from mindspeed_mm.fsdp.params.training_args import TrainingArguments


def run_context(
    config: ResolvedConfig, dataset: MMDataset, *, world_size: int, mesh: str, global_batch: int | None
) -> RunContext:
    """The context of `checkpoint.resume.check_resumable`, but for `batching`, which the loader knows.

    Args:
        config: The configuration.
        dataset: What is trained on.
        world_size: Ranks of the job.
        mesh: Its axes, in words.
        global_batch: Samples of an optimizer step; None where the number of ranks is not known.
    """
    training = config.arguments.training
    base = base_of_adapters(training) or config.arguments.model.model_name_or_path
    context: RunContext = {
        "world_size": world_size,
        "mesh": mesh,
        "config": resolved_dict(config),
        "dataset": dataset.fingerprint(),
        "global_batch": global_batch,
        "seed": training.seed,
        "versions": {"mindspeed-mm": __version__, "torch": torch.__version__},
    }
    if training.lora.enable and base:
        context["base_weights"] = base_weights_mark(Path(base))
    return context


def base_of_adapters(training: TrainingArguments) -> Path | None:
    """Other weights than those of the model folder, under adapters: no checkpoint of the run holds them."""
    return weights_folder_of_load(training.load) if training.lora.enable else None
