"""A bound for gradient norms that follows them: the moving average of the norm, and three standard deviations more.

Facts: Open-Sora Plan 1.5's adaptive gradient clipping, MindSpeed-MM `patchs/adaptive_clip_grad_patch.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_DEVIATIONS = 3.0
_FIRST_FACTOR, _FIRST_MOST = 3.0, 1.0
"""The average begins with this many times the first norm, at most so much."""


@dataclass
class NormAverage:
    """Mean and variance of the norms of steps that were not clipped.

    Args:
        decay: Share of mean and variance that is kept at each step.
    """

    decay: float
    mean: float | None = None
    """None before the first step."""
    variance: float = 0.0

    def bound(self, fixed: float) -> float:
        """The largest norm of a step: mean + 3 √variance; before the first step `fixed`."""
        return fixed if self.mean is None else self.mean + _DEVIATIONS * math.sqrt(self.variance)

    def after_step(self, norm: float) -> None:
        """Take in the norm of a step that was applied, before clipping. One above the bound changes nothing."""
        if self.mean is None:
            self.mean = min(_FIRST_FACTOR * norm, _FIRST_MOST)
        elif norm <= self.bound(norm):
            self.mean = self.decay * self.mean + (1 - self.decay) * norm
            self.variance = self.decay * self.variance + (1 - self.decay) * (self.mean - norm) ** 2

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps; empty before the first step."""
        return {} if self.mean is None else {"mean": self.mean, "variance": self.variance}

    def load_state(self, state: dict[str, float]) -> None:
        """Go on from what a checkpoint has kept."""
        if state:
            self.mean, self.variance = state["mean"], state["variance"]
