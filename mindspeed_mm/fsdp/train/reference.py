"""Policies that a trained one is compared with: its own model without adapters, or a second model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError, Problem, told_as
from mindspeed_mm.fsdp.checkpoint.base_weights import told_weights
from mindspeed_mm.fsdp.loss.head_loss import HeadLoss
from mindspeed_mm.fsdp.models.lora.switch import adapters_off
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.lora_args import LoraArguments
from mindspeed_mm.fsdp.train.assemble import Assembled, assemble

_FOLDER_OF_POLICY, _FOLDER = "model.model_name_or_path", "posttrain.reference.model_name_or_path"


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
        """For the log."""
        return "the model with its adapters off"


class FrozenModel:
    """A second model, which is never trained.

    Args:
        assembled: From `assemble_reference`.
        name: For the log.
    """

    def __init__(self, assembled: Assembled, name: str) -> None:
        assert assembled.applied.head is not None
        self._head, self._name = assembled.applied.head, name
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
        """For the log."""
        return f"a frozen copy of {self._name}"


def assemble_reference(arguments: Arguments, device: torch.device) -> Assembled:
    """The policy as its training starts, or the model of `posttrain.reference.model_name_or_path`: sharded as the
    policy is, in the type that it computes in, without anything that is trained.

    Raises:
        ConfigError: `training.load` names a checkpoint, of which a reference cannot be made.
        ModelFolderError: Weights are missing or of another shape.
    """
    check_start(arguments)
    weights = None if arguments.posttrain.reference.model_name_or_path else told_weights(arguments.training.load)
    with told_of_reference(arguments):
        return assemble(reference_start(arguments), device, weights=weights, trains=False)


def reference_start(arguments: Arguments) -> Arguments:
    """The configuration of the policy, as that of its reference."""
    folder = arguments.posttrain.reference.model_name_or_path
    given = {"model_name_or_path": folder} if folder else {}
    lora = arguments.training.lora
    if folder or not (lora.pretrained_lora_path or lora.frozen_adapters or lora.quantize):
        lora = LoraArguments()  # what it starts with adds nothing to the model
    return arguments.model_copy(
        update={
            "model": arguments.model.model_copy(update=given),
            "training": arguments.training.model_copy(update={"lora": lora}),
        }
    )


@contextmanager
def told_of_reference(arguments: Arguments) -> Iterator[None]:
    """What is wrong with a folder of its own is told under the key that names it."""
    has_own = arguments.posttrain.reference.model_name_or_path is not None

    def with_key(problem: Problem) -> Problem:
        return replace(problem, key=_FOLDER) if has_own and problem.key in ("", _FOLDER_OF_POLICY) else problem

    with told_as(with_key):
        yield


def check_same_tokens(policy: nn.Module, reference: nn.Module, folder: str | None) -> None:
    """Raise `ConfigError` where a reference of another kind or vocabulary would read the policy's batches as something
    else."""
    own, other = (_reads(model) for model in (policy, reference))
    if own != other:
        raise ConfigError(
            f"'{folder}' is a {other[0]} with {other[1]:,} tokens, and the trained model is a {own[0]} with "
            f"{own[1]:,}: it would read the same rows otherwise",
            key=_FOLDER,
            way_out="Name a model of the same family and vocabulary.",
        )


def _reads(model: nn.Module) -> tuple[str, int]:
    config: Any = model.config
    return str(config.model_type), int(config.get_text_config().vocab_size)


def check_start(arguments: Arguments) -> None:
    """Raise `ConfigError` unless the weights that training starts from can be loaded a second time."""
    load = arguments.training.load
    own = arguments.posttrain.reference.model_name_or_path
    if load and not own and told_weights(load) is None:
        raise ConfigError(
            f"{load} is a checkpoint of a training, and a reference starts from a folder of weights",
            key="training.load",
            way_out="Export it (mm export) and name that folder in model.model_name_or_path.",
        )
