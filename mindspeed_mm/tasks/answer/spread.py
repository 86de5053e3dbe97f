"""A model that does not fit one device, spread over the ranks of a job to answer: by the plan of a YAML.

Every rank holds its part and answers the same rows in the same order, so that all of them call the model equally often,
as sharded layers must be.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments, LossConfig
from mindspeed_mm.fsdp.sampling.answers.asking import QuestionEncoder, RowsView
from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.fsdp.utils.ranks import Ranks
from mindspeed_mm.tasks.model_source import ModelSource
from mindspeed_mm.tasks.spread_model import check_spread, load_part, read_plan

_OF_SEQUENCES: JsonObject = {"ring_attention_size": 1, "ulysses_parallel_size": 1, "data_parallel_size": None}
"""An answer has no long sequence to split: ranks that share one in training hold shards of the weights here."""


def load_over_ranks(
    source: ModelSource, view: RowsView, plan: Path, ranks: Ranks, adapters: Mapping[str, Path] | None
) -> Generator:
    """This rank's part of a model, with its processor. Every rank of the job calls it.

    Raises:
        UsageError: There are adapters to be spread, or nothing to spread over.
        MMError: As `load_spread`.
    """
    check_spread(source, ranks.world_size, "mm merge", has_adapters=bool(adapters))
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
    whole_logits = FeatureArguments(loss_cfg=LossConfig(loss_type="raw"))
    part = load_part(read_plan(plan, folder, _OF_SEQUENCES, features=whole_logits))
    model: Any = part.model
    if getattr(model.config, "is_encoder_decoder", False):
        what = f"{type(model).__name__} is answered by one process"
        raise ConfigError(what, key="--plan", way_out="Leave it out.")
    if (folder / "generation_config.json").is_file():
        from transformers import GenerationConfig  # seconds

        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    # Towers run within the model's own forward: before it, sharded layers are not gathered.
    model._supports_mm_encoder_outputs = lambda: False
    return model
