"""The one order in which a model is put together. Each step relies on those above it.

Tied groups are read → (adapters → quantised linears → pipeline split →) parallel plans that change modules → hooks that
must see full modules → `fully_shard`, children before the root → prefetch order → weights, straight into the shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from mindspeed_mm.fsdp.distributed.idle_towers import IdleTowers
from mindspeed_mm.fsdp.distributed.torch_parallelize import ParallelApplier
from mindspeed_mm.fsdp.loss.labelled_rows import LabelledRowsHead
from mindspeed_mm.fsdp.models.materialize import materialize
from mindspeed_mm.fsdp.models.modelhub import LoadReport, ModelHub
from mindspeed_mm.fsdp.models.spec import ModelSpec, resolve_spec
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype

EVERYTHING = ("*",)
"""The pattern of all names."""


@dataclass(frozen=True)
class Assembled:
    """A model ready to train."""

    model: nn.Module
    spec: ModelSpec
    head: LabelledRowsHead | None
    towers: IdleTowers | None
    loaded: LoadReport

    @property
    def attention(self) -> str:
        """Name of the attention implementation, for the log."""
        return getattr(getattr(self.model, "config", None), "_attn_implementation", None) or "the model's own"


def assemble(
    arguments: Arguments, device: torch.device, *, weights: Path | None = None, load_weights: bool = True
) -> Assembled:
    """Build, shard and load the model that the configuration names.

    Args:
        arguments: The whole configuration.
        device: Where the parameters live.
        weights: Folder of weights other than `model.model_name_or_path` (`training.load` with a Hugging Face folder).
        load_weights: False leaves the parameters without values: a checkpoint will fill them.

    Raises:
        ConfigError: A pattern of the plan matches nothing.
        ModelFolderError: Weights are missing, left over or of another shape.
    """
    param_dtype = arguments.parallel.fsdp_plan.param_dtype
    model = ModelHub.build(arguments.model, param_dtype=torch_dtype(param_dtype), feature_args=arguments.features)
    spec = resolve_spec(model)

    # Both hooks read full hidden states and modules by their own names: they stand before sharding.
    head = LabelledRowsHead(model.get_submodule(spec.head)) if spec.head else None
    towers = IdleTowers(model, spec.towers) if spec.towers else None

    ParallelApplier(arguments.parallel, shard_modules=spec.shard_modules, tie_groups=spec.tie_groups)(model)

    training = arguments.training
    loaded = LoadReport()
    parameter_device = torch.device("cpu") if arguments.parallel.fsdp_plan.cpu_offload else device
    if load_weights:
        loaded = ModelHub.load_weights(
            model,
            arguments.model,
            folder=weights,
            seed=training.seed,
            device=parameter_device,
            buffer_device=device,
            allow_missing=training.allow_missing if training.load_strict else EVERYTHING,
            allow_unexpected=training.allow_unexpected if training.load_strict else EVERYTHING,
        )
    else:
        materialize(model, parameter_device, device)
    model.train()
    return Assembled(model, spec, head, towers, loaded)
