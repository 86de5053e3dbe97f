"""What `mm check` asks of a model that is built, without weights and on one process: everything that training would
refuse before it splits the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from mindspeed_mm.checkpoint.safetensors_folder import find_entries
from mindspeed_mm.core.patterns import resolve_patterns
from mindspeed_mm.fsdp.checkpoint.base_weights import told_weights
from mindspeed_mm.fsdp.features.apply_features import FeaturesApplier
from mindspeed_mm.fsdp.features.speed.apply_speed import apply_speed
from mindspeed_mm.fsdp.models.diffusion.transformer import transformer_weights
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.folder import require_folder
from mindspeed_mm.fsdp.models.loading.stream import check_weights
from mindspeed_mm.fsdp.models.lora.apply import apply_lora
from mindspeed_mm.fsdp.models.lora.files import check_adapters
from mindspeed_mm.fsdp.models.lora.names import is_adapter_weight
from mindspeed_mm.fsdp.models.structure.spec import find_blocks
from mindspeed_mm.fsdp.models.structure.towers import find_towers
from mindspeed_mm.fsdp.optimizer.groups import parameter_groups
from mindspeed_mm.fsdp.optimizer.matrices import matrices
from mindspeed_mm.fsdp.optimizer.state_formats import check_packages
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.training_args import TrainingArguments

EVERYTHING = ("*",)
"""The pattern of all names."""


def model_steps(model: nn.Module, arguments: Arguments) -> Iterator[Callable[[], Any]]:
    """The questions, in the order in which training meets them; each raises `MMError`, and the next may be asked all
    the same. They change the model as training does.

    Args:
        model: Built by `ModelHub.build`.
        arguments: The whole configuration.
    """
    training, plan = arguments.training, arguments.parallel.fsdp_plan
    if training.lora.enable:
        yield partial(apply_lora, model, training.lora)
        yield partial(_check_first_adapters, model, training.lora.pretrained_lora_path)
    yield partial(apply_speed, model, arguments)
    names = [name for name, _ in model.named_modules()]
    for key in ("apply_modules", "ignored_modules", "hook_modules"):
        yield partial(resolve_patterns, getattr(plan, key) or (), names, key=f"parallel.fsdp_plan.{key}")
    towers = {tower.module for tower in find_towers(model)}
    applier = FeaturesApplier(arguments.features, find_blocks(model), model_args=arguments.model, towers=towers)
    yield partial(applier.check, model)
    yield partial(_check_optimizer, model, arguments)
    folder = weights_told(training)
    if folder is not None or not (arguments.model.train_from_scratch or training.load):
        yield partial(_check_weights, model, arguments, folder)


def _check_first_adapters(model: nn.Module, path: str | None) -> None:
    """Adapters to start from are those of this model. That they are there at all, the stage of paths says."""
    if path is not None and Path(path).exists() and facts_of(model).lora is not None:
        check_adapters(model, path)


def _check_optimizer(model: nn.Module, arguments: Arguments) -> None:
    training = arguments.training
    check_packages(training.optimizer_state_dtype)
    parameter_groups(model, training)
    if training.optimizer == "muon":
        matrices(model, {name for name, parameter in model.named_parameters() if parameter.requires_grad})


def weights_told(training: TrainingArguments) -> Path | None:
    """The model folder that `training.load` names; None where it names none, or a checkpoint."""
    if training.load is None or not Path(training.load).is_dir():
        return None
    is_told = training.load_format == "hf" or (training.load_format == "auto" and told_weights(training.load))
    return Path(training.load) if is_told else None


def _check_weights(model: nn.Module, arguments: Arguments, told: Path | None) -> None:
    """The folder, `training.load` where it is `told`, has what the model asks for, by the headers of its files."""
    if not any(parameter.is_meta for name, parameter in model.named_parameters() if not is_adapter_weight(name)):
        return  # a plugin's class has loaded them itself
    training, adapter = arguments.training, facts_of(model).adapter
    named = arguments.model.model_name_or_path
    folder = told or (require_folder(named) if adapter is None else adapter.folder)
    folder = folder if adapter is None else transformer_weights(folder)
    find_entries(folder)
    check_weights(
        model,
        folder,
        allow_missing=training.allow_missing if training.load_strict else EVERYTHING,
        allow_unexpected=training.allow_unexpected if training.load_strict else EVERYTHING,
    )
