"""The one door to an optimizer: how it is built, and room for its state that a checkpoint holds: cut as the parameter
is, and where the optimizer keeps it.

Of weights of which only the rows of new tokens are trained, the gradient of all other rows is removed as soon as it is
whole, before its norm is taken. AdamW leaves a row with zero gradients and without weight decay as it is, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.local_shard import local, local_pieces, room_like
from mindspeed_mm.fsdp.models.structure.stages import first_names, whole_of
from mindspeed_mm.fsdp.optimizer.adamw import ShardedAdamW, StreamedAdamW
from mindspeed_mm.fsdp.optimizer.groups import Group, GroupPlan, parameter_groups
from mindspeed_mm.fsdp.optimizer.lion import Lion
from mindspeed_mm.fsdp.optimizer.muon import Muon
from mindspeed_mm.fsdp.optimizer.offload import offload_gradients
from mindspeed_mm.fsdp.optimizer.state_formats import check_packages
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.training_args import OPTIMIZERS, TrainingArguments
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
    train_rows_only(model)
    gradients_on_host = features is not None and features.enable_gradient_offload
    if gradients_on_host:
        offload_gradients(model.parameters())
    if training.optimizer == "lion":
        return Lion(groups, lr=training.lr, betas=(training.lion_beta1, training.lion_beta2))
    options: dict[str, Any] = {
        "lr": training.lr,
        "betas": (training.adam_beta1, training.adam_beta2),
        "eps": training.adam_eps,
        "fused": training.adam_fused and _is_fused_here(groups, note),
    }
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
    swaps, dtype = OPTIMIZERS[training.optimizer].moments_on_host, training.optimizer_state_dtype
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


# --- rows of new tokens -----------------------------------------------------------------------------------------------


def train_rows_only(model: nn.Module) -> None:
    """From now on let only the new rows of a model with adapters have gradients.

    Args:
        model: Under any plan, its parameters off the meta device.
    """
    lora = facts_of(whole_of(model)).lora
    if lora is None or not lora.token_rows:
        return
    copies = first_names(model)
    for name, parameter in model.named_parameters():
        rows = lora.token_rows.get(copies.get(name, name))
        if rows is not None:
            own = torch.tensor(_own_rows(parameter, rows), dtype=torch.long, device=local(parameter).device)
            # FSDP2 calls it when the gradient is summed over ranks, autograd where nothing is sharded.
            parameter.register_post_accumulate_grad_hook(partial(_keep_rows, own))


def _own_rows(parameter: torch.Tensor, rows: Iterable[int]) -> Sequence[int]:
    """Positions of rows of the full tensor in this rank's part."""
    found: set[int] = set()
    whole = local(parameter)
    for piece, (region, *_) in local_pieces(parameter):
        start, length = region
        offset = (piece.storage_offset() - whole.storage_offset()) // whole.stride(0) if piece.numel() else 0
        found.update(row - start + offset for row in rows if start <= row < start + length)
    return sorted(found)


@torch.no_grad()
def _keep_rows(rows: torch.Tensor, parameter: torch.Tensor) -> None:
    if parameter.grad is None:
        return
    gradient = local(parameter.grad)
    kept = gradient[rows]
    gradient.zero_()
    gradient[rows] = kept


# --- room for state of a checkpoint -----------------------------------------------------------------------------------


def state_room(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str, size: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Room for one entry of a parameter's state.

    Args:
        optimizer: Has the parameter.
        parameter: Sharded or not.
        key: Of the entry.
        size: Of the whole entry. What differs from the parameter's in more than the last dimension is whole on every
            rank.
        dtype: As it was stored.
    """
    device = _device_of_state(optimizer, parameter, key)
    if size and len(size) == parameter.ndim and tuple(size[:-1]) == tuple(parameter.shape[:-1]):
        return room_like(parameter, dtype, device, size)
    return torch.empty(tuple(size), dtype=dtype, device=device)


def _device_of_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str) -> torch.device:
    if isinstance(optimizer, StreamedAdamW):
        return optimizer.state_device(key, parameter)
    is_on_device = key != "step" or optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    if is_on_device:
        return local(parameter).device
    return torch.device("cpu")
