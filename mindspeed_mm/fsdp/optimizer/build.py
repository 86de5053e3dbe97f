"""The one door to an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from mindspeed_mm.fsdp.models.structure.share import first_names
from mindspeed_mm.fsdp.optimizer.adamw import StreamedAdamW
from mindspeed_mm.fsdp.optimizer.gradient_offload import offload_gradients
from mindspeed_mm.fsdp.optimizer.groups import Group, GroupPlan, parameter_groups
from mindspeed_mm.fsdp.optimizer.muon import Muon
from mindspeed_mm.fsdp.optimizer.sharded_adamw import ShardedAdamW
from mindspeed_mm.fsdp.optimizer.shards import local
from mindspeed_mm.fsdp.optimizer.state_formats import check_packages
from mindspeed_mm.fsdp.optimizer.token_rows import train_rows_only
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.training_args import TrainingArguments
from mindspeed_mm.fsdp.utils.model_parts import attribute_at


def build_optimizer(
    model: nn.Module,
    training: TrainingArguments,
    features: FeatureArguments | None = None,
    plan: GroupPlan | None = None,
    *,
    note: Callable[[str], None],
) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters of a sharded model.

    Each group carries `lr_scale`, the factor of `training.lr_scaling_plan`; `set_lr` multiplies it in.

    Args:
        model: Under any plan, its parameters off the meta device.
        training: The `training` section.
        features: The `features` section, whose `enable_gradient_offload` lets gradients leave the device.
        plan: How the parameters of the whole model are treated; None: it is resolved here.
        note: Shows a sentence to the user.

    Raises:
        ConfigError: No parameter is trainable, a pattern matches nothing, a package is absent, or the optimizer cannot
            do with the model.
    """
    check_packages(training.optimizer_state_dtype)
    groups = parameter_groups(model, training, plan)
    options: dict[str, Any] = {
        "lr": training.lr,
        "betas": (training.adam_beta1, training.adam_beta2),
        "eps": training.adam_eps,
        "fused": training.adam_fused and _is_fused_here(groups, note),
    }
    train_rows_only(model)
    gradients_on_host = features is not None and features.enable_gradient_offload
    if gradients_on_host:
        offload_gradients(model.parameters())
    copies = first_names(model)
    names = {parameter: copies.get(name, name) for name, parameter in model.named_parameters()}
    if training.optimizer == "muon":
        return Muon(
            groups,
            names,
            momentum=training.muon_momentum,
            steps=training.ns_steps,
            matched_rms=training.matched_adamw_rms,
            **options,
        )
    swaps, dtype = training.optimizer == "adamw_swap", training.optimizer_state_dtype
    if not (swaps or dtype or gradients_on_host):
        return ShardedAdamW(groups, **options)
    return StreamedAdamW(
        groups, names, state_dtype=dtype, swaps=swaps, memory_share=training.mem_fraction_static, **options
    )


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Whose state it has: optimizers of one kind go on from each other's checkpoints."""
    return str(attribute_at(optimizer, "kind", type(optimizer).__name__))


def _is_fused_here(groups: list[Group], note: Callable[[str], None]) -> bool:
    """Whether torch has the fused kernel for the devices that the parameters are on; says so when it has not."""
    parameters = chain.from_iterable(group["params"] for group in groups)
    devices = {local(parameter).device.type for parameter in parameters}
    lacking = sorted(devices - set(_get_fused_kernels_supported_devices()))
    if lacking:
        note(f"no fused AdamW on {', '.join(lacking)}: training.adam_fused is taken as false")
    return not lacking
