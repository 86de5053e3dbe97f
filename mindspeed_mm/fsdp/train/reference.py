"""Policies that a trained one is compared with: its own model without adapters, or a second model."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.checkpoint.base_weights import weights_folder_of_load
from mindspeed_mm.fsdp.loss.head_loss import HeadLoss
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.lora.switch import adapters_off
from mindspeed_mm.fsdp.optimizer.ema import Ema
from mindspeed_mm.fsdp.params.argument import Arguments, PosttrainArguments, TrainingArguments
from mindspeed_mm.fsdp.params.rules.posttrain import has_moving_reference, reference_kind
from mindspeed_mm.fsdp.train.assemble import Assembled, assemble
from mindspeed_mm.fsdp.train.reference_start import FOLDER_KEY, reference_start, told_of_reference

_ADAPTERS_OFF = "the model with its adapters off"


class AdaptersOff:
    """The policy's own model with its adapters switched off.

    Args:
        head: Of the policy.
    """

    def __init__(self, head: HeadLoss) -> None:
        self._head = head

    def log_probs(
        self,
        model: nn.Module,
        inputs: Batch,
        rows: Tensor,
        targets: Tensor,
        suppressed: Tensor | None = None,
        *,
        temperature: float = 1.0,
    ) -> Tensor:
        """(n,) of the model without its adapters."""
        with adapters_off(model):
            return self._head.log_probs(model, inputs, rows, targets, suppressed, temperature=temperature)

    def describe(self) -> str:
        """Return which model the reference is, for the log."""
        return _ADAPTERS_OFF


class FrozenModel:
    """A second model, which is never trained.

    Args:
        assembled: From `assemble_reference`.
        described: From `describe_reference`.
    """

    def __init__(self, assembled: Assembled, described: str) -> None:
        assert assembled.applied.head is not None
        self._head, self._described = assembled.applied.head, described
        self.model = assembled.model

    def log_probs(
        self,
        model: nn.Module,
        inputs: Batch,
        rows: Tensor,
        targets: Tensor,
        suppressed: Tensor | None = None,
        *,
        temperature: float = 1.0,
    ) -> Tensor:
        """(n,) of the frozen model."""
        return self._head.log_probs(self.model, inputs, rows, targets, suppressed, temperature=temperature)

    def describe(self) -> str:
        """Return which model the reference is, for the log."""
        return self._described


class FollowingModel:
    """A copy of the policy that follows it every so many steps. It takes the policy's place in the model while it is
    asked.

    Args:
        head: Of the policy.
        copy: What is kept.
        described: From `describe_reference`.
    """

    def __init__(self, head: HeadLoss, copy: Ema, described: str) -> None:
        self._head, self._copy, self._described = head, copy, described

    def log_probs(
        self,
        model: nn.Module,
        inputs: Batch,
        rows: Tensor,
        targets: Tensor,
        suppressed: Tensor | None = None,
        *,
        temperature: float = 1.0,
    ) -> Tensor:
        """Return the (n,) log-probabilities of the labelled tokens by the copy."""
        with self._copy.applied():
            return self._head.log_probs(model, inputs, rows, targets, suppressed, temperature=temperature)

    def describe(self) -> str:
        """Return which model the reference is, for the log."""
        return self._described


def describe_reference(arguments: Arguments) -> str:
    """For the log: which policy a model that is asked while training is."""
    settings = arguments.posttrain.reference
    if reference_kind(arguments) == "adapters_off":
        return _ADAPTERS_OFF
    if has_moving_reference(arguments.posttrain):
        return f"a copy that takes {settings.mixup_alpha:g} of the policy every {settings.sync_steps} steps"
    return f"a frozen copy of {settings.model_name_or_path or 'the model that training starts from'}"


def assemble_reference(arguments: Arguments, device: torch.device) -> Assembled:
    """The policy as its training starts, or the model of `posttrain.reference.model_name_or_path`: sharded as the
    policy is, in the type that it computes in, without anything that is trained.

    Raises:
        ConfigError: `training.load` names a checkpoint, of which a reference cannot be made.
        ModelFolderError: Weights are missing or of another shape.
    """
    check_start(arguments.training, arguments.posttrain)
    weights = None
    if not arguments.posttrain.reference.model_name_or_path:
        weights = weights_folder_of_load(arguments.training.load)
    with told_of_reference(arguments.posttrain):
        return assemble(reference_start(arguments), device, weights=weights, trains=False)


def check_same_inputs(policy: nn.Module, reference: nn.Module, folder: str | None, key: str = FOLDER_KEY) -> None:
    """Raise `ConfigError` where a reference of another kind, vocabulary or width would read the policy's batches as
    something else, or not at all."""
    own, other = (_reads(model) for model in (policy, reference))
    if own != other:
        what = "vocabulary" if facts_of(policy).kind.has_tokens else "widths of latents and text"
        raise ConfigError(
            f"'{folder}' is {other}, and the trained model is {own}: it would read the same rows otherwise",
            key=key,
            way_out=f"Name a model of the same family and {what}.",
        )


def _reads(model: nn.Module) -> str:
    """What a model's inputs are, in words."""
    adapter = facts_of(model).adapter
    if adapter is None:
        config = cast(Any, model.config)
        return f"a {config.model_type} with {int(config.get_text_config().vocab_size):,} tokens"
    settings = adapter.transformer_config
    widths = {name: settings[name] for name in _INPUT_WIDTHS if settings.get(name) is not None}
    return f"a {settings.get('_class_name')} with {', '.join(f'{name} {width}' for name, width in widths.items())}"


_INPUT_WIDTHS = ("in_channels", "joint_attention_dim", "text_dim", "caption_channels", "text_embed_dim", "image_dim")
"""Keys of a transformer's configuration that say how wide its inputs are."""


def check_start(training: TrainingArguments, posttrain: PosttrainArguments) -> None:
    """Raise `ConfigError` unless the weights that training starts from can be loaded a second time."""
    load = training.load
    own = posttrain.reference.model_name_or_path
    if load and not own and weights_folder_of_load(load) is None:
        raise ConfigError(
            f"{load} is a checkpoint of a training, and a reference starts from a folder of weights",
            key="training.load",
            way_out="Export it (mm export) and name that folder in model.model_name_or_path.",
        )
