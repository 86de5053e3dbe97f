"""A model that does not fit one device, spread over the ranks of a job to answer: by the plan of a YAML.

Every rank holds its part and answers the same rows in the same order, so that all of them call the model equally often,
as sharded layers must be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mindspeed_mm.core.errors import CollectedErrors, ConfigError, UsageError
from mindspeed_mm.fsdp.distributed.parallel_state import init_parallel_state
from mindspeed_mm.fsdp.models.loading.construction import set_dtypes
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments, LossConfig
from mindspeed_mm.fsdp.params.lora_args import LoraArguments
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from mindspeed_mm.fsdp.plan.apply import apply_plan, fill
from mindspeed_mm.fsdp.plan.outline import build_outline
from mindspeed_mm.fsdp.plan.resolve import resolve_plan
from mindspeed_mm.fsdp.sampling.answers.asking import QuestionEncoder, RowsView
from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype
from mindspeed_mm.fsdp.utils.ranks import Ranks
from mindspeed_mm.tasks.model_source import ModelSource

_OF_SEQUENCES: dict[str, Any] = {"ring_attention_size": 1, "ulysses_parallel_size": 1, "data_parallel_size": None}
"""An answer has no long sequence to split: ranks that share one in training hold shards of the weights here."""


def load_over_ranks(
    source: ModelSource, view: RowsView, plan: Path, ranks: Ranks, adapters: Mapping[str, Path] | None
) -> Generator:
    """This rank's part of a model, with its processor. Every rank of the job calls it.

    Raises:
        UsageError: There are adapters to be spread, or nothing to spread over.
        MMError: As `load_spread`.
    """
    check_spread(ranks.world_size)
    if source.lora is not None or adapters:
        way_out = "Merge them first: mm merge."
        raise UsageError("adapters are not spread over ranks", key="--plan", way_out=way_out)
    encoder = QuestionEncoder(source.folder, view)
    return Generator(load_spread(source.folder, plan), encoder, group=dist.group.WORLD)


def load_spread(folder: Path, plan: Path) -> Any:
    """This rank's part of a model, ready to generate. Every rank of the job calls it.

    Args:
        folder: A Hugging Face folder.
        plan: The YAML whose section `parallel` says how the model is spread, and in which type it computes.

    Raises:
        ConfigError: The plan does not fit the model or the number of ranks, or spreads layers.
        ModelFolderError: Weights or configuration are missing or broken.
    """
    arguments = _arguments(folder, plan)
    device = current_device()
    state = init_parallel_state(resolve_parallel_sizes(arguments.parallel, dist.get_world_size()), device.type)
    errors = CollectedErrors()
    outline = build_outline(arguments, errors=errors)
    resolved = resolve_plan(outline, arguments, state.sizes, errors=errors)
    if getattr(outline.model.config, "is_encoder_decoder", False):
        raise ConfigError(f"{type(outline.model).__name__} is answered by one process", key="--plan")
    for parameter in outline.model.parameters():
        parameter.requires_grad_(False)
    set_dtypes(outline.model, torch_dtype(arguments.parallel.fsdp_plan.param_dtype))  # no master weights
    applied = apply_plan(outline, replace(resolved, head=None), arguments, state)
    fill(applied, arguments, device, weights=None, load_weights=True)
    model: Any = applied.model
    if (folder / "generation_config.json").is_file():
        from transformers import GenerationConfig  # seconds

        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    # Towers run within the model's own forward: before it, sharded layers are not gathered.
    model._supports_mm_encoder_outputs = lambda: False
    return model.eval()


def check_spread(world_size: int) -> None:
    """Raise when there is nothing to spread a model over.

    Raises:
        UsageError: The job has one process.
    """
    if world_size == 1:
        raise UsageError("one process holds the whole model", key="--plan", way_out="Add --nproc N, or leave it out.")


def _arguments(folder: Path, plan: Path) -> Arguments:
    """The YAML's, for this folder, without what only training does."""
    arguments = load_with_plugins(plan).arguments
    if arguments.parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            "an answer is not made by layers that are spread over ranks",
            where=str(plan),
            key="parallel.pipeline_parallel_size",
            way_out="Set it to 1, and spread the weights: fully_shard_parallel_size, tensor_parallel_size.",
        )
    model = {"model_name_or_path": str(folder), "train_from_scratch": False, "freeze": ()}
    return arguments.model_copy(
        update={
            "model": arguments.model.model_copy(update=model),
            "parallel": arguments.parallel.model_copy(update=_OF_SEQUENCES),
            "features": FeatureArguments(loss_cfg=LossConfig(loss_type="raw")),  # whole logits
            "training": arguments.training.model_copy(update={"lora": LoraArguments()}),
        }
    )
