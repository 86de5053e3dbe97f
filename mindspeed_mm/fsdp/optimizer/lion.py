"""Lion: AdamW's decay with the sign of a momentum as the direction. One state per number, and no denominator.

Chen et al. 2023, arXiv:2302.06675, algorithm 2. Each number is updated on its own, so a rank works on its shards alone.
Where a gradient is zero but for rounding, such as that of the keys' bias in an attention, its sign is chance: there,
plans differ by a step of the learning rate.
"""

from __future__ import annotations

import torch
from typing_extensions import override

from mindspeed_mm.fsdp.models.loading.local_shard import local, room_like
from mindspeed_mm.fsdp.optimizer.groups import Group
from mindspeed_mm.fsdp.optimizer.offload import forget_gradients, offloaded, own_gradient

MOMENTUM = "exp_avg"


class Lion(torch.optim.Optimizer):
    """Lion on shards.

    Args:
        groups: Of parameters, with their settings.
        lr: Learning rate, which is the size of every update of a number.
        betas: Share of the momentum in the direction, and decay of the momentum.
    """

    kind = "Lion"

    def __init__(self, groups: list[Group], *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            forget_gradients(group["params"])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None or offloaded(parameter) is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: Group) -> None:
        weights, gradient, state = local(parameter), own_gradient(parameter), self.state[parameter]
        if not state:
            state[MOMENTUM] = room_like(parameter, parameter.dtype, weights.device)
        momentum = local(state[MOMENTUM])
        for_direction, for_momentum = group["betas"]
        direction = momentum.lerp(gradient, 1 - for_direction).sign_()
        momentum.lerp_(gradient, 1 - for_momentum)
        weights.mul_(1 - group["lr"] * group["weight_decay"])
        weights.add_(direction, alpha=-group["lr"])
