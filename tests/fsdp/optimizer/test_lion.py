"""Lion equals algorithm 2 of its paper, written number by number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.fsdp.optimizer.lion import MOMENTUM, Lion


def by_the_paper(
    weight: float, gradients: list[float], lr: float, beta1: float, beta2: float, decay: float
) -> tuple[float, float]:
    """Chen et al. 2023, arXiv:2302.06675, algorithm 2: the number θ and its momentum m after these gradients."""
    momentum = 0.0
    for gradient in gradients:
        c = beta1 * momentum + (1 - beta1) * gradient
        sign = (c > 0) - (c < 0)
        weight = weight - lr * (sign + decay * weight)
        momentum = beta2 * momentum + (1 - beta2) * gradient
    return weight, momentum


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.3, 0.6)])
def test_equals_the_paper(betas: tuple[float, float]) -> None:
    draws = torch.Generator().manual_seed(0)
    start = torch.randn(4, 3, dtype=torch.float64, generator=draws)
    gradients = torch.randn(6, 4, 3, dtype=torch.float64, generator=draws)
    gradients[:, 0, 0] = 0
    decayed, kept = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    frozen = nn.Parameter(start.clone())
    groups: list[dict[str, Any]] = [
        {"params": [decayed], "weight_decay": 0.3, "lr": 0.05},
        {"params": [kept, frozen], "weight_decay": 0.0},
    ]
    optimizer = Lion(groups, lr=0.1, betas=betas)
    for gradient in gradients:
        decayed.grad, kept.grad = gradient.clone(), gradient.clone()
        optimizer.step()
    for parameter, lr, decay in ((decayed, 0.05, 0.3), (kept, 0.1, 0.0)):
        for row in range(4):
            for column in range(3):
                numbers = gradients[:, row, column].tolist()
                weight, momentum = by_the_paper(float(start[row, column]), numbers, lr, *betas, decay)
                assert float(parameter.detach()[row, column]) == pytest.approx(weight, rel=1e-13, abs=1e-14)
                assert float(optimizer.state[parameter][MOMENTUM][row, column]) == pytest.approx(momentum, rel=1e-12)
    assert torch.equal(frozen, start) and not optimizer.state[frozen]
    assert decayed[0, 0] != start[0, 0] and kept[0, 0] == start[0, 0]  # the sign of 0 is 0; decay goes on
