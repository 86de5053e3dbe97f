"""A number that tells the weights that drew a rollout from others."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_mm.core.seeds import derive_seed

_AS_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def weights_mark(model: nn.Module) -> int:
    """Of all trained parameters, to the bit, on all ranks the same. Sums of whole numbers wrap around and are exact, so
    it depends on no order; another plan, which keeps copies elsewhere, gives another number."""
    total = torch.zeros((), dtype=torch.int64)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            bits = own.contiguous().view(_AS_WHOLE[own.element_size()])
            factor = derive_seed(name) % 2**31 | 1
            total += bits.sum(dtype=torch.int64).cpu() * factor
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return int(total)
