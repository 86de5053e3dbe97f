"""A model that a function of the user has built is the same on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm.core.errors import MachineError


def check_same_model(model: nn.Module) -> None:
    """Raise `MachineError` where ranks have built different models: sharding keeps of each rank's values its own part,
    which would go unnoticed. Names, shapes and sums of the values are compared before anything is sharded."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    own = {name: _mark(parameter) for name, parameter in model.named_parameters()}
    everyone = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    for rank, other in enumerate(everyone):
        names = [name for name in {**own, **other} if own.get(name) != other.get(name)]
        if names:
            me, what = dist.get_rank(), f"'{names[0]}' differs"
            if len(names) > 1:
                what = f"'{names[0]}' and {len(names) - 1} more parameters differ"
            raise MachineError(
                f"ranks {min(rank, me)} and {max(rank, me)} have built different models: {what}",
                key="model_provider",
                way_out="Draw no numbers that depend on the rank while the model is built: all ranks have the seed of "
                "training.seed (--seed) there.",
            )


@torch.no_grad()
def _mark(parameter: torch.Tensor) -> tuple[tuple[int, ...], str, float, float]:
    """Shape, type, and two sums of the values."""
    shape, dtype = tuple(parameter.shape), str(parameter.dtype)
    if parameter.is_meta:
        return shape, dtype, 0.0, 0.0
    values = parameter.detach().reshape(-1)
    sums = torch.stack([values.sum(dtype=torch.float32), values.abs().sum(dtype=torch.float32)])
    # A value that is not a number equals no other: two ranks that have it are alike.
    first, second = sums.nan_to_num().tolist()
    return shape, dtype, first, second
