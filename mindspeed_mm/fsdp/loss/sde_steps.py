"""Sampling steps of flow matching that draw noise: from x at level σ to x' at the lower level σ', with a density; and
which of a sampler's steps they are: all, a share, or a window that moves along (MixGRPO, arXiv 2507.21802).

x_σ = (1 − σ) x₀ + σ ε, and v = ε − x₀ is what the model predicts. Every step is Normal(mean, std² · 1); with a noise
level of 0 it is the ODE's Euler step, x + v (σ' − σ).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from mindspeed_mm.core.seeds import derive_seed

SdeKind = Literal["flow", "dance", "cps"]


class StepDensity(NamedTuple):
    """The distribution of x': a normal one with the same standard deviation in all dimensions."""

    mean: torch.Tensor
    """(B, …)."""
    std: float
    """Of every dimension; 0: the step draws nothing."""


@dataclass(frozen=True)
class SdeSteps:
    """One way to draw noise on a grid of noise levels.

    `flow`: s = a √(σ / (1 − σ)) (Flow-GRPO, arXiv 2505.05470, equation 9); `dance`: s = η (DanceGRPO, 2505.07818). Both
    step by mean = x + [v + s² / (2σ) (x + (1 − σ) v)] Δ and std = s √−Δ, with Δ = σ' − σ. `cps` keeps the level of
    noise that the grid asks for (Flow-CPS, 2509.05952): std = σ' sin(η π / 2),
    mean = (1 − σ') x̂₀ + √(σ'² − std²) x̂₁.

    Args:
        kind: Which.
        noise_level: a or η; 0: steps of the ODE.
        sigmas: Noise levels from high to low, one more than there are steps; the last is 0.
    """

    kind: SdeKind
    noise_level: float
    sigmas: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.sigmas) - 1

    def delta(self, index: int) -> float:
        """Δ of a step, negative."""
        return self.sigmas[index + 1] - self.sigmas[index]

    def std(self, index: int) -> float:
        """Standard deviation of a step; 0 where nothing is drawn."""
        if self.kind == "cps":
            return self.sigmas[index + 1] * math.sin(self.noise_level * math.pi / 2)
        return self._diffusion(index) * math.sqrt(-self.delta(index))

    def ode(self, x: torch.Tensor, v: torch.Tensor, index: int) -> torch.Tensor:
        """Return x' after the ODE's Euler step, x + v Δ, in the shape of x."""
        return x + v * self.delta(index)

    def density(self, x: torch.Tensor, v: torch.Tensor, index: int) -> StepDensity:
        """Return the density of x' after a step.

        Args:
            x: (B, …) at the step's upper level.
            v: Predicted there, of the same shape.
            index: Of the step.
        """
        sigma, lower, std = self.sigmas[index], self.sigmas[index + 1], self.std(index)
        if self.kind == "cps":
            noise = x + (1 - sigma) * v
            return StepDensity((1 - lower) * clean(x, v, sigma) + math.sqrt(lower**2 - std**2) * noise, std)
        pull = self._diffusion(index) ** 2 / (2 * sigma)
        return StepDensity(x + (v + pull * (x + (1 - sigma) * v)) * self.delta(index), std)

    def _diffusion(self, index: int) -> float:
        """s of a step. √(σ / (1 − σ)) has no value at σ = 1: there the level below stands in the denominator."""
        if self.kind == "dance":
            return self.noise_level
        sigma = self.sigmas[index]
        below = sigma if sigma < 1 else self.sigmas[index + 1]
        return self.noise_level * math.sqrt(sigma / (1 - below))


@dataclass(frozen=True)
class SdeStep:
    """One step of a grid."""

    steps: SdeSteps
    index: int

    @property
    def delta(self) -> float:
        """Δ = σ' − σ of this step, which is negative."""
        return self.steps.delta(self.index)

    def density(self, x: torch.Tensor, v: torch.Tensor) -> StepDensity:
        """Return the density of x' given x and v; see `SdeSteps.density`."""
        return self.steps.density(x, v, self.index)


def clean(x: torch.Tensor, v: torch.Tensor, sigma: float | torch.Tensor) -> torch.Tensor:
    """x̂₀ = x − σ v, the mean of the clean latents given x."""
    return x - sigma * v


def log_prob(sample: torch.Tensor, density: StepDensity) -> torch.Tensor:
    """(B,) mean over dimensions of log N(sample; mean, std²): a sum would grow with the size of a picture, and with it
    every ratio."""
    squares = (sample - density.mean).square() / (2 * density.std**2)
    return (-squares - math.log(density.std) - 0.5 * math.log(2 * math.pi)).flatten(1).mean(dim=1)


def kl_divergence(mean: torch.Tensor, other: torch.Tensor, std: float) -> torch.Tensor:
    """(B,) mean over dimensions of KL(N(mean, std²) ‖ N(other, std²)) = (mean − other)² / (2 std²)."""
    return ((mean - other).square() / (2 * std**2)).flatten(1).mean(dim=1)


# --- which steps are trained ------------------------------------------------------------------------------------------

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
