"""Advantages of answers: how much better each is than the other answers to its prompt.

They are made of the rewards of all ranks, before anything is cut into micro-batches: a group that is judged by a part
of itself has another mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Scale = Literal["group", "batch", "none"]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]

EPSILON = 1e-4
"""Added to standard deviations (TRL's number)."""


@dataclass(frozen=True)
class Advantages:
    """What rewards come to. A answers; groups are consecutive."""

    values: torch.Tensor
    """(A,) fp64; 0 where no reward judged the answer."""
    rewards: torch.Tensor
    """(A,) fp64, the weighted sum; not a number where no reward judged the answer."""
    without_spread: float
    """Share of groups whose answers are all worth the same: nothing is learnt from them."""


def group_advantages(
    rewards_AR: torch.Tensor,
    weights_R: torch.Tensor,
    group_size: int,
    *,
    scale: Scale = "group",
    aggregation: Aggregation = "sum_then_normalize",
) -> Advantages:
    """Advantages of answers, group by group.

    `sum_then_normalize`: R = Σ w·r, A = (R − mean of the group) / (std + 1e-4), std unbiased, of the group or of the
    batch; `none` leaves the division out (GRPO, arXiv:2402.03300, section 4.1.2; without std: Dr. GRPO, 2503.20783).
    `normalize_then_sum`: each reward is normalised in its group, their weighted sum over the batch (GDPO, 2601.05242).
    A reward that is not a number (null) is left out of means, deviations and sums.

    Args:
        rewards_AR: (answers, rewards), of all ranks; NaN where a reward does not judge an answer.
        weights_R: (rewards,).
        group_size: Answers to each prompt; consecutive.
        scale: Which standard deviation divides; read for `sum_then_normalize`.
        aggregation: What is normalised.
    """
    rewards_AR, weights_R = rewards_AR.double(), weights_R.double()
    judged_A = ~rewards_AR.isnan().all(dim=1)
    nan = torch.tensor(float("nan"), dtype=torch.float64)
    sums_A = torch.where(judged_A, (rewards_AR * weights_R).nansum(dim=1), nan)
    spread_G = _std(sums_A.view(-1, group_size), dim=1)
    if aggregation == "normalize_then_sum":
        grouped = rewards_AR.view(-1, group_size, rewards_AR.shape[1])
        own = (grouped - grouped.nanmean(dim=1, keepdim=True)) / (_std(grouped, dim=1).unsqueeze(1) + EPSILON)
        total_A = torch.where(judged_A, (own.view_as(rewards_AR) * weights_R).nansum(dim=1), nan)
        values_A = (total_A - total_A.nanmean()) / (_std(total_A, dim=0) + EPSILON)
    else:
        values_A = (sums_A.view(-1, group_size) - sums_A.view(-1, group_size).nanmean(dim=1, keepdim=True)).view(-1)
        if scale == "group":
            values_A = values_A / (spread_G.repeat_interleave(group_size) + EPSILON)
        elif scale == "batch":
            values_A = values_A / (_std(sums_A, dim=0) + EPSILON)
    flat = spread_G.nan_to_num(0.0) < 1e-8
    return Advantages(values_A.nan_to_num(0.0), sums_A, float(flat.double().mean()))


def _std(numbers: torch.Tensor, dim: int) -> torch.Tensor:
    """Unbiased, of what is a number."""
    known = ~numbers.isnan()
    count = known.sum(dim=dim)
    squares = (numbers - numbers.nanmean(dim=dim, keepdim=True)).square()
    return (squares.nansum(dim=dim) / (count - 1).clamp(min=1)).sqrt().where(count > 0, float("nan"))
