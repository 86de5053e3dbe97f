"""torch's AdamW on the shards themselves: every number is updated on its own, so a rank needs no other's. Given sharded
tensors, torch works out in the first step how the whole list of them is placed, which takes many Python calls: close to
a million for a model with a hundred parameters."""

from __future__ import annotations

import torch

from mindspeed_mm.fsdp.optimizer.groups import Group
from mindspeed_mm.fsdp.optimizer.shards import local


class ShardedAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov & Hutter 2019), the same to the bit as torch's; its state is sharded as the parameters are."""

    kind = "AdamW"

    def _init_group(self, group: Group, *lists: list[torch.Tensor]) -> bool:
        """torch's own, which fills the lists that one update works on: parameters, gradients, states."""
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [local(tensor) for tensor in tensors]
        return has_complex
