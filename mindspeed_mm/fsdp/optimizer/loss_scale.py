"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2), as `torch.amp.GradScaler`
does it: gradients below 6e-8 are zero in fp16, so the loss is multiplied before the backward pass and the gradients are
divided after it. A step whose gradients overflow is left out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mindspeed_mm.core.counts import is_count

GROWTH, BACKOFF = 2.0, 0.5
"""`torch.amp.GradScaler`'s factors."""
LARGEST = 2.0**127
"""The largest power of two in fp32."""


@dataclass
class LossScale:
    """The scale, and what it goes by.

    Args:
        value: What the loss is multiplied by.
        window: Steps in a row without overflow after which it grows.
        least: It does not fall below.
    """

    value: float
    window: int
    least: float
    good_steps: int = 0
    """Steps without overflow since it last changed."""

    @property
    def can_fall(self) -> bool:
        """Whether a smaller scale is still to be tried."""
        return self.value > self.least

    def can_explain(self, losses: Iterable[float]) -> bool:
        """Whether a step that is not finite is one of a scale that was too large, on whatever rank: the losses are
        numbers, and a smaller scale can be tried."""
        return self.can_fall and all(map(math.isfinite, losses))

    def after_step(self, step: int, *, overflowed: bool) -> str:
        """Go on after a step; returns why it was left out, if it was."""
        before = self.value
        self.update(overflowed=overflowed)
        if not overflowed:
            return ""
        return (
            f"step {step}: gradients overflowed in fp16 and were left out; the loss scale falls from {before:g} to "
            f"{self.value:g}"
        )

    def update(self, *, overflowed: bool) -> None:
        """After a step: halve it when gradients overflowed, double it after `window` steps in which none did."""
        if overflowed:
            self.value, self.good_steps = max(self.value * BACKOFF, self.least), 0
            return
        self.good_steps += 1
        if self.good_steps >= self.window:
            self.value, self.good_steps = min(self.value * GROWTH, LARGEST), 0

    def state(self) -> dict[str, float]:
        """Return what a checkpoint keeps of the scale; `load_state` reads it."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint. Raises `KeyError`, `TypeError` or `ValueError` for what is no state."""
        value, good_steps = float(state["value"]), state["good_steps"]
        if not 0 < value <= LARGEST or not is_count(good_steps):
            raise ValueError(f"a scale of {value:g} after {good_steps!r:.20} steps")
        self.value, self.good_steps = value, int(good_steps)
