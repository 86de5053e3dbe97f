"""Whether a folder has the weights that a model asks for, by the headers of its files."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from mindspeed_mm.checkpoint.safetensors_folder import find_entries
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.checkpoint.base_weights import has_weights, told_by_load, weights_folder_of_load
from mindspeed_mm.fsdp.checkpoint.hf import check_leads_back
from mindspeed_mm.fsdp.models.diffusion.transformer import weights_folder
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.folder import require_folder
from mindspeed_mm.fsdp.models.loading.stream import check_weights
from mindspeed_mm.fsdp.models.lora.names import is_adapter_weight
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.params.rules.posttrain import has_moving_reference
from mindspeed_mm.fsdp.params.training_args import TrainingArguments
from mindspeed_mm.fsdp.plan.apply import EVERYTHING
from mindspeed_mm.fsdp.plan.outline import Outline, build_outline
from mindspeed_mm.fsdp.train.distillation.critic_start import (
    critic_folder,
    critic_key,
    critic_start,
    told_of_critic,
)
from mindspeed_mm.fsdp.train.reference import check_same_inputs, check_start
from mindspeed_mm.fsdp.train.reference_start import reference_outline, reference_start, told_of_reference


def weights_to_start_from(training: TrainingArguments) -> Path | None:
    """The model folder that `training.load` names; None where it names none, or a checkpoint."""
    if training.load is None or not Path(training.load).is_dir():
        return None
    if training.load_format == "auto":
        return weights_folder_of_load(training.load)
    if training.load_format in {"hf", "megatron"}:
        return Path(training.load)
    return None


def check_stored_weights(outline: Outline, model: ModelArguments, training: TrainingArguments) -> None:
    """Raise what training would when it loads the weights that a run starts from.

    Raises:
        ModelFolderError: Weights are missing, left over or of another shape.
    """
    told = weights_to_start_from(training)
    starts_without = model.train_from_scratch or training.load
    if (told is None and starts_without) or not _lacks_values(outline.model):
        return
    folder = weights_folder(outline.model, told or require_folder(model.model_name_or_path))
    if not has_weights(folder):
        find_entries(folder)  # says what is wrong
    missing, unexpected = training.allow_missing, training.allow_unexpected
    if not training.load_strict:
        missing = unexpected = EVERYTHING
    with told_by_load(training.load if told is not None else None):
        check_weights(outline.model, folder, allow_missing=missing, allow_unexpected=unexpected)


def check_weights_and_names(outline: Outline, model: ModelArguments, training: TrainingArguments) -> None:
    """Raise what training would when it loads the weights that a run starts from, and what an export would where a
    plugin's rules of stored names do not lead back. Those of our own families do.

    Raises:
        ModelFolderError: See `check_stored_weights`; or weights of the folder would be missing from the export.
    """
    check_stored_weights(outline, model, training)
    if not training.plugin or model.model_name_or_path is None or not _lacks_values(outline.model):
        return
    whole = outline.model
    folder = weights_folder(whole, Path(model.model_name_or_path))
    if not has_weights(folder):
        return
    if facts_of(whole).lora is not None:
        whole = ModelHub.build(model.model_copy(update={"train_from_scratch": True, "freeze": []}))
    check_leads_back(whole, folder)


def check_reference(arguments: Arguments, policy: nn.Module) -> None:
    """Raise what training would when it builds the reference of preferences or of a divergence.

    Args:
        arguments: The configuration.
        policy: On meta.

    Raises:
        MMError: It cannot be built, has no weights, or reads other tokens than the policy.
    """
    folder = arguments.posttrain.reference.model_name_or_path
    if has_moving_reference(arguments.posttrain):
        return  # it begins as a copy of the policy, whatever that starts from
    check_start(arguments.training, arguments.posttrain)
    if folder is None:
        return
    start = reference_start(arguments)
    with told_of_reference(arguments.posttrain):
        outline = reference_outline(arguments)
        # The adapters and the checkpoint that the policy goes on from are not the reference's.
        check_stored_weights(outline, start.model, start.training.model_copy(update=_FRESH))
    check_same_inputs(policy, outline.model, folder)


def check_critic(arguments: Arguments, student: nn.Module) -> None:
    """Raise what training would when it builds the critic of a distillation.

    Args:
        arguments: The configuration.
        student: On meta.

    Raises:
        MMError: It cannot be built, has no weights, or reads other batches than the student.
    """
    folder = critic_folder(arguments.posttrain)
    if folder is None:
        return
    start = critic_start(arguments)
    with told_of_critic(arguments.posttrain):
        outline = build_outline(start)
        check_stored_weights(outline, start.model, start.training.model_copy(update=_FRESH))
    check_same_inputs(student, outline.model, folder, critic_key(arguments.posttrain))


_FRESH: JsonObject = {"load": None}


def _lacks_values(model: nn.Module) -> bool:
    """False for a model whose class, a plugin's, has loaded its weights itself."""
    return any(p.is_meta for name, p in model.named_parameters() if not is_adapter_weight(name))
