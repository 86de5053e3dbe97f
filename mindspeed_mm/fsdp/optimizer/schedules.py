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
}
"""Share of the way from `lr_min` up to `lr`, by progress through the decay in [0, 1]."""
ANNEALS: dict[str, Callable[[float], float]] = {
    "linear": DECAYS["linear"],
    "cosine": DECAYS["cosine"],
    "exponential": lambda progress: 2.0 * 0.5**progress - 1.0,
    "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""The same for the last part of `wsd`; the shapes that Megatron-Core has (`optimizer_param_scheduler.py`, 0.12.1)."""

STYLES = (*DECAYS, "wsd")
"""What `training.lr_decay_style` may name."""


@dataclass(frozen=True)
class Schedule:
    """Warm-up from `lr_start` to `lr`, then decay to `lr_min`.

    `constant` holds `lr`. `linear` and `cosine` (Loshchilov & Hutter 2017, eq. 5, one cycle) decay over the first
    `decay_ratio` of all steps and hold `lr_min` from there on; `wsd` (warm-up, stable, decay: Hu et al. 2024) holds
    `lr` and decays in the shape of `wsd_style` over the *last* `decay_ratio` of all steps.

    Step s of a warm-up of w steps, counted from 0, has the share (s + 1) / w of the way; with `warms_from_start` s / w,
    as in Megatron-Core, where w need not be whole: the first step has `lr_start` itself.
    """

    style: str
    lr: float
    lr_min: float
    lr_start: float
    warmup_steps: float
    decay_ratio: float
    total_steps: int
    wsd_style: str = "linear"
    warms_from_start: bool = False

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise ConfigError(f"'{self.style}' is not one of {', '.join(STYLES)}", key="training.lr_decay_style")

    def at(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            done = step if self.warms_from_start else step + 1
            return self.lr_start + (self.lr - self.lr_start) * done / self.warmup_steps
        decay_steps = max(1, round(self.decay_ratio * self.total_steps))
        begin, end, share = self.warmup_steps, decay_steps, DECAYS.get(self.style)
        if share is None:
            share = ANNEALS[self.wsd_style]
            begin, end = max(self.warmup_steps, self.total_steps - decay_steps), self.total_steps
        progress = min(max((step - begin) / max(1, end - begin), 0.0), 1.0)
        return self.lr_min + (self.lr - self.lr_min) * share(progress)
