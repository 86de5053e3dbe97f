"""Which steps of a sampler draw noise and are trained: all of them, a share, or a window that moves along (MixGRPO,
arXiv 2507.21802)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mindspeed_mm.core.seeds import derive_seed

WindowOrder = Literal["progressive", "random"]


@dataclass(frozen=True)
class TrainedWindow:
    """Steps that draw noise and are trained, by the number of the rollout: a function of it alone, so that a resumed
    run goes on where it was.

    The last step of a sampler is never one of them: nothing is drawn there (std → 0).

    Args:
        steps: Of the sampler.
        size: Of the window; None: all steps, or `fraction` of them.
        order: progressive: from much noise to little; random: anywhere, drawn from the seed.
        iterations: Rollouts until the window moves.
        stride: Steps that it moves by.
        roll_back: Begin again at the first step when the window has reached the end; else it stays there.
        fraction: Without a window, the share of the steps that are trained, drawn from the seed for each rollout.
        seed: Of what is drawn.
    """

    steps: int
    size: int | None = None
    order: WindowOrder = "progressive"
    iterations: int = 25
    stride: int = 1
    roll_back: bool = True
    fraction: float = 1.0
    seed: int = 0

    def drawn(self, rollout: int) -> tuple[int, ...]:
        """Steps that draw noise in a rollout; the others are the ODE's.

        Args:
            rollout: Its number, from 0.
        """
        if self.size is None:
            return tuple(range(self.steps - 1))
        first = self._first(rollout // self.iterations)
        return tuple(range(first, first + self.size))

    def trained(self, rollout: int) -> tuple[int, ...]:
        """Steps of a rollout that are trained."""
        drawn = self.drawn(rollout)
        count = max(1, math.floor(len(drawn) * self.fraction))
        if count == len(drawn):
            return drawn
        chosen = self._random("steps", rollout).permutation(len(drawn))[:count]
        return tuple(drawn[index] for index in sorted(chosen.tolist()))

    def _first(self, moves: int) -> int:
        places = self.steps - (self.size or 0)  # of windows that leave the last step out
        if self.order == "random":
            return int(self._random("window", moves).integers(places))
        stops = math.ceil((places - 1) / self.stride) + 1
        stop = moves % stops if self.roll_back else min(moves, stops - 1)
        return min(stop * self.stride, places - 1)

    def _random(self, *of: str | int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=derive_seed(self.seed, *of)))
