"""Parameter groups: which weights decay, which learn faster, which are matrices to Muon."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.patterns import resolve_patterns
from mindspeed_mm.fsdp.models.structure.share import first_names, whole_of
from mindspeed_mm.fsdp.optimizer.matrices import matrices
from mindspeed_mm.fsdp.params.training_args import TrainingArguments


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group `lr` times its own scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def parameter_groups(model: nn.Module, training: TrainingArguments) -> list[dict[str, Any]]:
    """Trainable parameters by (weight decay, lr scale, matrices to Muon); vectors (norms, biases) and what is named do
    not decay.

    The groups are those of the whole model: a stage of a pipeline may have no parameter in some of them. Each carries
    `lr_scale`, which `set_lr` multiplies in, and `matrices`, the matrices that one of its parameters (or experts) is, 0
    for AdamW.
    """
    whole, copies = whole_of(model), first_names(model)
    trainable = {name: p for name, p in whole.named_parameters() if p.requires_grad}
    if not trainable:
        raise ConfigError("every parameter is frozen", key="model.freeze", way_out="Leave something to train.")
    undecayed = _undecayed_names(whole, trainable, training)
    scales = _lr_scales(trainable, training)
    counts = matrices(whole, trainable) if training.optimizer == "muon" else {}
    by_settings: dict[tuple[float, float, int], list[nn.Parameter]] = {}
    settings = {
        name: (0.0 if name in undecayed else training.weight_decay, scales[name], counts.get(name, 0))
        for name in trainable
    }
    for each in settings.values():
        by_settings.setdefault(each, [])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            by_settings[settings[copies.get(name, name)]].append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": decay,
            "lr_scale": scale,
            "lr": training.lr * scale,
            "matrices": count,
        }
        for (decay, scale, count), parameters in sorted(by_settings.items(), key=lambda item: item[0])
    ]


def _undecayed_names(model: nn.Module, trainable: dict[str, nn.Parameter], training: TrainingArguments) -> set[str]:
    names = {name for name, parameter in trainable.items() if parameter.ndim < 2}
    if training.no_decay_params:
        names.update(
            resolve_patterns(training.no_decay_params, trainable, key="training.no_decay_params", allow_suffix=True)
        )
    modules = dict(model.named_modules())
    for pattern in training.no_decay_modules:
        # A class name (`LayerNorm`) or a module pattern (`model.visual.*`).
        found = [name for name, module in modules.items() if type(module).__name__.removeprefix("FSDP") == pattern]
        for module in found or resolve_patterns([pattern], modules, key="training.no_decay_modules"):
            names.update(name for name in trainable if name.startswith(f"{module}."))
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
