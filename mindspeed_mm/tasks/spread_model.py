"""This rank's part of a model that is too large for one device, to answer or to draw: by the plan of a YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from mindspeed_mm.core.errors import CollectedErrors, ConfigError, UsageError
from mindspeed_mm.fsdp.distributed.parallel_state import ParallelState, init_parallel_state
from mindspeed_mm.fsdp.models.loading.construction import set_dtypes
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.lora_args import LoraArguments
from mindspeed_mm.fsdp.params.posttrain_args import PosttrainArguments
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from mindspeed_mm.fsdp.plan.apply import apply_plan, fill
from mindspeed_mm.fsdp.plan.outline import Outline, build_outline
from mindspeed_mm.fsdp.plan.resolve import resolve_plan
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype
from mindspeed_mm.tasks.model_source import ModelSource


@dataclass(frozen=True)
class ModelPart:
    """A model of which this rank holds a part."""

    model: nn.Module
    """Frozen, in evaluation mode, on this rank's device. All ranks call it together and equally often."""
    outline: Outline
    state: ParallelState


def read_plan(plan: Path, folder: Path, parallel: Mapping[str, object], **sections: Any) -> Arguments:
    """The configuration of a YAML for a folder, without what only training does.

    Args:
        plan: The YAML whose section `parallel` says how the model is spread, and in which type it computes.
        folder: Of the model.
        parallel: Keys of `parallel` that have no use here, with what they are instead.
        sections: Put in place of the YAML's.

    Raises:
        ConfigError: It spreads layers.
    """
    arguments = load_with_plugins(plan).arguments
    if arguments.parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            "layers that are spread over ranks can only be trained",
            where=str(plan),
            key="parallel.pipeline_parallel_size",
            way_out="Set it to 1, and spread the weights: fully_shard_parallel_size, tensor_parallel_size.",
        )
    model = sections.pop("model", arguments.model)
    own = {"model_name_or_path": str(folder), "train_from_scratch": False, "freeze": ()}
    return arguments.model_copy(
        update={
            "model": model.model_copy(update=own),
            "parallel": arguments.parallel.model_copy(update=dict(parallel)),
            "training": arguments.training.model_copy(update={"lora": LoraArguments()}),
            "posttrain": PosttrainArguments(),
            **sections,
        }
    )


def load_part(arguments: Arguments, weights: Path | None = None) -> ModelPart:
    """Build, spread and fill a model. Every rank of the job calls it.

    Args:
        arguments: From `read_plan`.
        weights: Folder of the weights; None: the model's own.

    Raises:
        ConfigError: The plan does not fit the model or the number of ranks.
        ModelFolderError: Weights or configuration are missing or broken.
    """
    device = current_device()
    state = init_parallel_state(resolve_parallel_sizes(arguments.parallel, dist.get_world_size()), device.type)
    errors = CollectedErrors()
    outline = build_outline(arguments, errors=errors)
    resolved = resolve_plan(outline, arguments, state.sizes, trains=False, errors=errors)
    for parameter in outline.model.parameters():
        parameter.requires_grad_(False)
    set_dtypes(outline.model, torch_dtype(arguments.parallel.fsdp_plan.param_dtype))  # no master weights
    applied = apply_plan(outline, replace(resolved, head=None), arguments.model, arguments.features, state)
    sections = arguments.model, arguments.training, arguments.parallel
    fill(applied, *sections, device, weights=weights, load_weights=True)
    return ModelPart(applied.model.eval(), outline, state)


def check_spread(source: ModelSource, world_size: int, merge: str, *, has_adapters: bool = False) -> None:
    """Raise when there is nothing to spread a model over, or adapters are to be spread.

    Args:
        source: The model.
        world_size: Number of ranks.
        merge: The command that puts adapters into the weights.
        has_adapters: Whether there are others than the source's.

    Raises:
        UsageError: The job has one process; or there are adapters.
    """
    if world_size == 1:
        raise UsageError("one process holds the whole model", key="--plan", way_out="Add --nproc N, or leave it out.")
    if source.lora is not None or has_adapters:
        raise UsageError("adapters are not spread over ranks", key="--plan", way_out=f"Merge them first: {merge}.")
