"""AdamW over parameter groups: which weights decay, which learn faster."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.patterns import resolve_patterns
from mindspeed_mm.fsdp.params.training_args import TrainingArguments


def build_optimizer(model: nn.Module, training: TrainingArguments) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019) on the trainable parameters of a sharded model.

    Each group carries `lr_scale`, the factor of `training.lr_scaling_plan`; `set_lr` multiplies it in.

    Raises:
        ConfigError: No parameter is trainable, or a pattern matches nothing.
    """
    groups = parameter_groups(model, training)
    return torch.optim.AdamW(
        groups,
        lr=training.lr,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_eps,
        fused=training.adam_fused,
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group `lr` times its own scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def parameter_groups(model: nn.Module, training: TrainingArguments) -> list[dict[str, Any]]:
    """Trainable parameters by (weight decay, lr scale); vectors (norms, biases) and what is named do not decay."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ConfigError("every parameter is frozen", key="model.freeze", way_out="Leave something to train.")
    undecayed = _undecayed_names(model, trainable, training)
    scales = _lr_scales(trainable, training)
    by_settings: dict[tuple[float, float], list[str]] = {}
    for name in trainable:
        settings = (0.0 if name in undecayed else training.weight_decay, scales[name])
        by_settings.setdefault(settings, []).append(name)
    return [
        {
            "params": [trainable[name] for name in names],
            "weight_decay": decay,
            "lr_scale": scale,
            "lr": training.lr * scale,
        }
        for (decay, scale), names in sorted(by_settings.items())
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
