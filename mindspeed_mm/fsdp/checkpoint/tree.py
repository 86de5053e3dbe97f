"""What a checkpoint holds of a live, sharded model and its optimizer, as a tree of named tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import nn

from mindspeed_mm.checkpoint.dcp_folder.storage import Tree
from mindspeed_mm.core.errors import CheckpointError, Problem
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.structure.stages import first_names
from mindspeed_mm.fsdp.optimizer.ema import Ema
from mindspeed_mm.fsdp.utils.device import synchronize

MODEL = "model"
OPTIMIZER = "optimizer"
EMA = "ema"
BESIDE, BESIDE_OPTIMIZER = "critic", "critic_optimizer"
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
_SHOWN = 5


class TrainedBeside(Protocol):
    """A second model that is trained beside the one that a run is about."""

    @property
    def model(self) -> nn.Module:
        """The second model, sharded as its plan says."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of what is trained of the second model."""
        ...


def plain_name(name: str) -> str:
    """A parameter's name without what recompute and compile wrappers put in."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def tensors_to_fill(model: nn.Module) -> dict[str, torch.Tensor]:
    """`model_tensors` for reading: a pipeline's rank that has only the copy of a shared weight gives it under the name
    of the weight."""
    tensors = model_tensors(model)
    for copy, parameter in named_copies(model).items():
        tensors.setdefault(first_names(model)[copy], parameter.detach())
    return tensors


def named_copies(model: nn.Module) -> dict[str, nn.Parameter]:
    """Copies of weights that another stage keeps, by own name; of a model with adapters those that are trained."""
    lora = facts_of(model).lora
    copies = {}
    for name, first in first_names(model).items():
        if lora is None or first in lora.trained:
            copies[name] = model.get_parameter(name)
    return copies


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters (frozen ones too) and persistent buffers, by name; they alias the model's memory. Of a model with
    adapters only what is trained: the rest is in the folder that the run started from.

    A shared parameter appears once, under the first of its names: see `tied_names`. A pipeline's rank gives what it
    holds, and of a weight that another stage keeps nothing.

    Raises:
        CheckpointError: A module keeps state that is not a tensor.
    """
    aliases, lora, copies = tied_names(model), facts_of(model).lora, first_names(model)
    tensors: dict[str, torch.Tensor] = {}
    for key, value in model.state_dict().items():  # FSDP2 hooks in here and hands out shards
        name = plain_name(key)
        if lora is not None and name not in lora.trained:
            continue
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"keeps state that is not a tensor but a {type(value).__name__}",
                where=name,
                way_out="Keep it in a buffer: checkpoints hold tensors only.",
            )
        if name not in aliases and name not in copies:
            tensors[name] = value.detach()
    return tensors


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further name of a shared parameter or buffer → its first name."""
    first_names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    everything = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in everything:
        # By identity: a shared parameter is one object under several names.
        first = first_names.setdefault(id(tensor), plain_name(name))
        if first != plain_name(name):
            aliases[plain_name(name)] = first
    return aliases


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Optimizer state as `state.<parameter>.<key>`; parameters that have not been stepped yet have none.

    Hyperparameters are not kept: they follow from the configuration, and the learning rate from the step.

    Raises:
        CheckpointError: The optimizer keeps state that is not a tensor.
    """
    synchronize()  # state on the host may be on its way there
    tensors: dict[str, torch.Tensor] = {}
    copies = first_names(model)
    for name, parameter in trained_parameters(model, optimizer).items():
        if name in copies:
            continue
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(f"optimizer state '{key}' of '{name}' is a {type(value).__name__}, not a tensor")
            tensors[f"state.{name}.{key}"] = value
    return tensors


def average_tensors(ema: Ema) -> dict[str, torch.Tensor]:
    """The average of the trainable parameters by their names; they alias its memory."""
    averages = {plain_name(name): tensor for name, tensor in ema.tensors().items()}
    for copy in first_names(ema.model):
        averages.pop(copy, None)
    return averages


def trained_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The optimizer's parameters by their names in the model."""
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    found = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found[names[id(parameter)]] = parameter
    return found


def cast_floats(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Floating-point tensors in `dtype`; the rest, and everything when it is None, as they are."""
    cast = dict(tensors)
    for name, tensor in tensors.items():
        if dtype is not None and tensor.is_floating_point():
            cast[name] = tensor.to(dtype)
    return cast


def snapshot(tree: Tree) -> Tree:
    """A copy in host memory that training cannot change any more."""
    copies: Tree = {}
    for part, tensors in tree.items():
        copies[part] = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    return copies


def tree_bytes(tree: Tree) -> int:
    """Bytes of the whole tree over all ranks: a sharded tensor states its global shape."""
    total = 0
    for tensors in tree.values():
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return total


def check_same_shapes(wanted: Mapping[str, Iterable[int]], held: Mapping[str, Iterable[int]], where: str) -> None:
    """Compare a model's tensors with a checkpoint's.

    Args:
        wanted: Name → shape in the model.
        held: Name → shape in the checkpoint.
        where: The checkpoint, for the message.

    Raises:
        CheckpointError: With the first differences of each kind and the totals.
    """
    missing, differing = [], []
    for name, shape in wanted.items():
        here = list(shape)
        there = list(held[name]) if name in held else None
        if there is None:
            missing.append(Problem("missing from the checkpoint", key=name))
        elif there != here:
            differing.append(Problem(f"{there} in the checkpoint, {here} in the model", key=name))
    unknown = [Problem("not in the model", key=name) for name in held if name not in wanted]
    if missing or unknown or differing:
        raise CheckpointError(
            f"{where} was saved from another model: {len(missing)} tensors are missing, {len(unknown)} unknown, "
            f"{len(differing)} of another shape. Resume with the configuration that saved it. Among them:",
            problems=[*missing[:_SHOWN], *unknown[:_SHOWN], *differing[:_SHOWN]],
        )
