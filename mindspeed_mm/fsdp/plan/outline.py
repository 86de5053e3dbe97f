"""A model as training has it before anything is split: on meta or with values, with adapters, kernels and experts as
the configuration chooses them, ready for packed rows where rows are packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from mindspeed_mm.core.errors import CollectedErrors, ConfigError
from mindspeed_mm.core.model_kinds import ModelKind
from mindspeed_mm.fsdp.features.speed.apply_speed import apply_speed
from mindspeed_mm.fsdp.loss.router_aux import leave_router_loss_to_us
from mindspeed_mm.fsdp.models.behaviour.experts import choose_experts
from mindspeed_mm.fsdp.models.behaviour.packed_rows import apply_packed_rows
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.lora.apply import apply_lora
from mindspeed_mm.fsdp.models.lora.files import check_adapters
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.models.structure.spec import ModelSpec, resolve_spec
from mindspeed_mm.fsdp.models.vocabulary import check_processor
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.plan.speed_facts import speed_facts
from mindspeed_mm.fsdp.utils.at_hand import arguments_at_hand
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype
from mindspeed_mm.fsdp.utils.model_parts import attribute_at

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter


@dataclass(frozen=True)
class Outline:
    """A model that is built and neither split nor sharded."""

    model: nn.Module
    spec: ModelSpec

    @property
    def adapter(self) -> DiffusionAdapter | None:
        """The family's adapter when the model is a generator, else None."""
        return facts_of(self.model).adapter

    @property
    def towers(self) -> set[str]:
        """Names of the modules in front of a decoder that take its media."""
        return {tower.module for tower in self.spec.towers}

    @property
    def kind(self) -> ModelKind:
        """What is done differently for this model."""
        return facts_of(self.model).kind


def build_outline(
    arguments: Arguments,
    given: nn.Module | None = None,
    *,
    may_be_empty: bool = False,
    packs: bool = False,
    processor: ProcessorMixin | PreTrainedTokenizerBase | None = None,
    errors: CollectedErrors | None = None,
) -> Outline:
    """Build the model that a configuration names, without values; or take a live one as it is.

    Args:
        arguments: The whole configuration.
        given: A model with its values, to be trained in place of what `model` names.
        may_be_empty: Its parameters may be on the meta device: they get values later.
        packs: Prepare the model for packed rows even where the configuration asks for none.
        processor: What makes the rows, to be compared with the model.
        errors: Where to keep the problems of steps that no other step needs; None: they are raised together.

    Raises:
        ConfigError: The model cannot be had as the configuration says.
        ModelFolderError: The folder cannot be understood, or rows are made for another model.
    """
    collected = errors or CollectedErrors()
    with arguments_at_hand(arguments):
        model = _build(arguments, given, collected, may_be_empty=may_be_empty)
    collected.attempt(check_processor, model, processor)
    for step in _building_steps(model, arguments, packs=packs):
        collected.attempt(step)
    if errors is None:
        collected.raise_all("the model cannot be prepared as the configuration says")
    return Outline(model, resolve_spec(model))


def packs_rows(arguments: Arguments) -> bool:
    """Whether samples share rows; data sets of generators and of plugins may not know the key."""
    return bool(attribute_at(arguments, "data.dataset_param.basic_parameters.packs", False))


def _build(arguments: Arguments, given: nn.Module | None, errors: CollectedErrors, *, may_be_empty: bool) -> nn.Module:
    param_dtype = torch_dtype(arguments.parallel.fsdp_plan.param_dtype)
    if given is not None:
        return ModelHub.adopt(given, arguments.model, param_dtype=param_dtype, may_be_empty=may_be_empty)
    build = partial(ModelHub.build, param_dtype=param_dtype, feature_args=arguments.features)
    try:
        return build(arguments.model)
    except ConfigError as error:
        if error.problems[0].key != "model.freeze":
            raise
        errors.errors.append(error)  # the other patterns can still be judged
        return build(arguments.model.model_copy(update={"freeze": ()}))


def _building_steps(model: nn.Module, arguments: Arguments, *, packs: bool) -> list[Callable[[], object]]:
    """What is done to the built model, in order; each step changes it."""
    section, features, lora = arguments.model, arguments.features, arguments.training.lora
    grouped, skip_padding = section.use_grouped_expert_matmul, features.skip_moe_pad_tokens
    steps: list[Callable[[], object]] = []
    if lora.enable:
        param_dtype = torch_dtype(arguments.parallel.fsdp_plan.param_dtype)
        steps.append(partial(apply_lora, model, lora, param_dtype=param_dtype))
        steps.append(partial(_check_first_adapters, model, lora.pretrained_lora_path))
    # Kernels are put in place of a layer's own operations: adapters come before, what runs layers piece by piece after.
    steps.append(partial(apply_speed, model, section, features, arguments.training, speed_facts(arguments)))
    steps.append(partial(leave_router_loss_to_us, model))
    steps.append(partial(choose_experts, model, grouped=grouped, skip_padding=skip_padding))
    if packs or packs_rows(arguments):
        steps.append(partial(apply_packed_rows, model, attention=section.attn_implementation))
    return steps


def _check_first_adapters(model: nn.Module, path: str | None) -> None:
    """Adapters to start from are those of this model. Whether they are there at all is a question of paths."""
    if path is not None and Path(path).exists() and facts_of(model).lora is not None:
        check_adapters(model, path)
