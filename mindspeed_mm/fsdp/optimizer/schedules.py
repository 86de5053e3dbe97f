"""Learning-rate schedules as pure functions of the step: a resumed run needs no state of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mindspeed_mm.core.errors import ConfigError

DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda _progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "wsd": lambda progress: 1.0 - progress,
}
"""Share of the way from `lr_min` up to `lr`, by progress through the decay in [0, 1]."""


@dataclass(frozen=True)
class Schedule:
    """Warm-up from `lr_start` to `lr`, then decay to `lr_min`.

    `constant` holds `lr`. `linear` and `cosine` (Loshchilov & Hutter 2017, eq. 5, one cycle) decay over the first
    `decay_ratio` of all steps and hold `lr_min` from there on; `wsd` (warm-up, stable, decay: Hu et al. 2024) holds
    `lr` and decays linearly over the *last* `decay_ratio` of all steps.
    """

    style: str
    lr: float
    lr_min: float
    lr_start: float
    warmup_steps: int
    decay_ratio: float
    total_steps: int

    def __post_init__(self) -> None:
        if self.style not in DECAYS:
            raise ConfigError(f"'{self.style}' is not one of {', '.join(DECAYS)}", key="training.lr_decay_style")
        if self.style == "wsd" and self.decay_ratio >= 1.0:
            raise ConfigError(
                "'wsd' decays over the last lr_decay_ratio of all steps: at 1.0 nothing stays stable",
                key="training.lr_decay_ratio",
                way_out="Set it to the share of steps that decay, e.g. 0.1.",
            )

    def at(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.lr_start + (self.lr - self.lr_start) * (step + 1) / self.warmup_steps
        decay_steps = max(1, round(self.decay_ratio * self.total_steps))
        begin, end = self.warmup_steps, decay_steps
        if self.style == "wsd":
            begin, end = max(self.warmup_steps, self.total_steps - decay_steps), self.total_steps
        progress = min(max((step - begin) / max(1, end - begin), 0.0), 1.0)
        return self.lr_min + (self.lr - self.lr_min) * DECAYS[self.style](progress)
