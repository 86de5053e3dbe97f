"""Parameter groups: which weights decay, which learn faster, which are matrices to Muon."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.patterns import is_inside, resolve_patterns
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.lora.names import is_adapter_weight
from mindspeed_mm.fsdp.models.structure.spec import find_blocks
from mindspeed_mm.fsdp.models.structure.stages import first_names, whole_of
from mindspeed_mm.fsdp.params.training_args import OPTIMIZERS, TrainingArguments
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, first_of

Group = dict[str, Any]
"""Parameters with their settings, as torch's optimizers take and keep them."""


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group `lr` times its own scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


class GroupSettings(NamedTuple):
    """How the optimizer treats a parameter."""

    weight_decay: float
    lr_scale: float
    """Factor on the learning rate."""
    matrices: int
    """The matrices that the parameter (or each of its experts) is to Muon, 0 for AdamW."""


@dataclass(frozen=True)
class GroupPlan:
    """How the optimizer treats each trainable parameter of a whole model."""

    settings: Mapping[str, GroupSettings]
    """By name."""

    def describe(self) -> str:
        """One line for the log: `12 decay, 8 do not`."""
        undecayed = sum(not each.weight_decay for each in self.settings.values())
        scaled = sum(each.lr_scale != 1 for each in self.settings.values())
        described = f"{len(self.settings) - undecayed} parameters decay, {undecayed} do not"
        if scaled:
            described += f", {scaled} with their own learning rate"
        return described


def resolve_groups(model: nn.Module, training: TrainingArguments) -> GroupPlan:
    """The plan of a whole model. Vectors (norms, biases), what is named, and weights of which only rows of new tokens
    are trained do not decay. Pure.

    Raises:
        ConfigError: No parameter is trainable, a pattern or a rule matches nothing, or Muon cannot take a matrix.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ConfigError("every parameter is frozen", key="model.freeze", way_out="Leave something to train.")
    undecayed = _undecayed_names(model, trainable, training)
    if (lora := facts_of(model).lora) is not None:
        undecayed.update(lora.token_rows)
    scales = _lr_scales(trainable, training)
    counts = matrices(model, trainable) if OPTIMIZERS[training.optimizer].for_matrices else {}
    settings = {}
    for name in trainable:
        decay = 0.0 if name in undecayed else training.weight_decay
        settings[name] = GroupSettings(decay, scales[name], counts.get(name, 0))
    return GroupPlan(settings)


def parameter_groups(model: nn.Module, training: TrainingArguments, plan: GroupPlan | None = None) -> list[Group]:
    """Trainable parameters as the optimizer takes them, those with the same settings together.

    The groups are those of the whole model: a stage of a pipeline may have no parameter in some of them. Each carries
    `lr_scale`, which `set_lr` multiplies in, and `matrices`.

    Args:
        model: Under any plan.
        training: The `training` section.
        plan: Of the whole model; None: it is resolved here.
    """
    copies = first_names(model)
    plan = plan or resolve_groups(whole_of(model), training)
    members: dict[GroupSettings, list[nn.Parameter]] = {each: [] for each in sorted(set(plan.settings.values()))}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            members[plan.settings[copies.get(name, name)]].append(parameter)
    groups = []
    for settings, parameters in members.items():
        lr = training.lr * settings.lr_scale
        groups.append({"params": parameters, "lr": lr, **settings._asdict()})
    return groups


def _undecayed_names(model: nn.Module, trainable: dict[str, nn.Parameter], training: TrainingArguments) -> set[str]:
    names = set()
    for name, parameter in trainable.items():
        if parameter.ndim < 2 or name.endswith((".bias", "_bias")):  # biases of stacked experts have two dimensions
            names.add(name)
    patterns = training.no_decay_params
    if patterns:
        names.update(resolve_patterns(patterns, trainable, key="training.no_decay_params", allow_suffix=True))
    modules = dict(model.named_modules())
    for pattern in training.no_decay_modules:
        # A class name (`LayerNorm`) or a module pattern (`model.visual.*`).
        found = [name for name, module in modules.items() if type(module).__name__.removeprefix("FSDP") == pattern]
        found = found or resolve_patterns([pattern], modules, key="training.no_decay_modules")
        names.update(name for name in trainable if is_inside(name, found))
    return names


def _lr_scales(names: Iterable[str], training: TrainingArguments) -> dict[str, float]:
    """First match wins; a rule that matches no parameter is an error."""
    names = list(names)
    scales = dict.fromkeys(names, 1.0)
    taken: set[str] = set()
    for index, rule in enumerate(training.lr_scaling_plan or ()):
        matched = {name for name in names if re.search(rule.match, name)}
        if not matched:
            raise ConfigError(
                f"'{rule.match}' matches no trainable parameter",
                key=f"training.lr_scaling_plan[{index}].match",
                way_out=f"Parameters look like '{names[0]}'.",
            )
        scales.update(dict.fromkeys(matched - taken, rule.scale))
        taken |= matched
    return scales


# --- Muon's matrices --------------------------------------------------------------------------------------------------

_GATE_AND_UP = "gate_up_proj"


def matrices(model: nn.Module, trainable: Collection[str]) -> dict[str, int]:
    """Matrices among the trainable parameters → how many each one is; per expert where experts are fused.

    They are the 2-D weights of the model's repeated blocks, routers among them (as in Moonlight, arXiv:2502.16982), and
    fused experts (E, …). All else is AdamW's: embeddings, the output head, what stands before, between and behind the
    blocks, norms, biases, convolutions, tables, and adapters, whose factors are not a map of hidden features.

    Experts' fused gate and up projections are two matrices, one above the other, as they are apart in dense models; in
    models that interleave their columns they are taken as one.

    Raises:
        ConfigError: There are none.
    """
    blocks = tuple(f"{name}." for name in find_blocks(model))
    found: dict[str, int] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{prefix}.{name}"
            is_hidden = full_name.startswith(blocks) and not is_adapter_weight(full_name)
            if full_name in trainable and is_hidden and (count := _count(module, name, parameter)):
                found[full_name] = count
    if not found:
        raise ConfigError(
            f"'muon' finds no matrix to train in the blocks of {type(model).__name__}",
            key="training.optimizer",
            way_out="Set adamw: adapters, embeddings and heads are AdamW's anyway.",
        )
    return found


def _count(module: nn.Module, name: str, parameter: nn.Parameter) -> int:
    """How many matrices a parameter is, or each of its experts; 0 for what is not a matrix."""
    if parameter.ndim == 3 and first_of(module, "is_transposed", "ep_forward"):
        has_gate_above_up = name == _GATE_AND_UP and not attribute_at(module, "is_transposed", True)
        if has_gate_above_up:
            return 2
        return 1
    is_matrix = parameter.ndim == 2 and name == "weight" and not isinstance(module, nn.Embedding)
    return int(is_matrix)
