"""A model ready to train: outlined, its plan resolved and applied, its values loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from mindspeed_mm.core.errors import CollectedErrors
from mindspeed_mm.fsdp.distributed.parallel_state import get_parallel_state
from mindspeed_mm.fsdp.models.behaviour.attention import attention_name
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.construction import set_dtypes
from mindspeed_mm.fsdp.models.lora.apply import LoraReport
from mindspeed_mm.fsdp.models.modelhub import LoadReport
from mindspeed_mm.fsdp.optimizer.ema import Ema
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.plan.apply import AppliedPlan, apply_plan, fill
from mindspeed_mm.fsdp.plan.model_plan import ModelPlan
from mindspeed_mm.fsdp.plan.outline import build_outline
from mindspeed_mm.fsdp.plan.resolve import resolve_plan
from mindspeed_mm.fsdp.train.run.utilisation import Utilisation
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.train.distillation.critic import Critic
    from mindspeed_mm.fsdp.utils.processor import Processor


@dataclass(frozen=True)
class Assembled:
    """A model ready to train."""

    plan: ModelPlan
    """What was done to the model."""
    applied: AppliedPlan
    """What the training step must know of it."""
    loaded: LoadReport
    utilisation: Utilisation
    """What the log says of FLOPs."""
    average: Ema | None = None
    """A copy of what is trained that follows it, where one is kept."""
    critic: Critic | None = None
    """What is trained beside the model, in a distillation."""

    @property
    def model(self) -> nn.Module:
        """The model; of a pipeline, this rank's part."""
        return self.applied.model

    @property
    def lora(self) -> LoraReport | None:
        """The adapters that are trained."""
        return facts_of(self.model).lora

    @property
    def attention(self) -> str:
        """Name of the attention implementation, for the log."""
        return attention_name(self.model)


def assemble(
    arguments: Arguments,
    device: torch.device,
    *,
    weights: Path | None = None,
    load_weights: bool = True,
    packs: bool = False,
    given: nn.Module | None = None,
    build: Callable[[], nn.Module] | None = None,
    processor: Processor | None = None,
    trains: bool = True,
) -> Assembled:
    """Build, shard and load the model that the configuration names.

    Args:
        arguments: The whole configuration.
        device: Where the parameters live.
        weights: Folder of weights other than `model.model_name_or_path` (`training.load` with a Hugging Face folder).
        load_weights: False leaves the parameters without values: a checkpoint will fill them.
        packs: Prepare the model for packed rows even where the configuration asks for none.
        given: A model with its values, to be trained in place of what `model` names.
        build: Makes the model, in place of what `model` names. One with values keeps them; parameters on meta get
            theirs from the folder of weights, or from scratch.
        processor: What makes the rows, to be compared with the model.
        trains: False for a model that is only compared with: nothing of it is trained, and all of it is kept in the
            type that the plan computes in.

    Raises:
        ConfigError: The model cannot be trained as the configuration says.
        ModelFolderError: Weights are missing, left over or of another shape; rows are made for another model.
    """
    state = get_parallel_state()
    errors = CollectedErrors()
    if build is not None:
        given = build()
    has_values = given is not None and not any(parameter.is_meta for parameter in given.parameters())
    outline = build_outline(
        arguments, given, may_be_empty=build is not None, packs=packs, processor=processor, errors=errors
    )
    if not trains:
        outline.model.requires_grad_(False)
        set_dtypes(outline.model, torch_dtype(arguments.parallel.fsdp_plan.param_dtype))
    plan = resolve_plan(outline, arguments, state.sizes, trains=trains, errors=errors)
    utilisation = Utilisation.of(outline, plan.features, arguments, trains=trains)
    sections = arguments.model, arguments.training, arguments.parallel
    applied = apply_plan(outline, plan, arguments.model, arguments.features, state)
    loaded = fill(applied, *sections, device, weights=weights, load_weights=load_weights)
    applied.model.train()
    if has_values:  # they are the caller's own, of no folder
        loaded = replace(loaded, folder="")
    return Assembled(plan, applied, loaded, utilisation)
