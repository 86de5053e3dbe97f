"""Noise levels of flow matching: how σ is drawn, shifted and weighted. σ = 0 is data, σ = 1 is noise."""

from __future__ import annotations

import math

import numpy as np

from mindspeed_mm.fsdp.models.diffusion.noise_paths import Density
from mindspeed_mm.fsdp.params.diffusion_args import DiffusionArguments

_BELL_FLOOR = math.exp(-0.5)
_BELL_MEAN = math.sqrt(math.pi / 2) * math.erf(math.sqrt(0.5)) - _BELL_FLOOR
"""Mean of exp(−2 (σ − ½)²) − exp(−½) over 0..1."""


def draw_level(density: Density, arguments: DiffusionArguments, random: np.random.Generator) -> float:
    """A number in 0..1 by a density: one noise level before the shift.

    Densities: Esser et al. 2024 (arXiv 2403.03206), section 3.1: logit-normal, and mode with scale s,
    σ = 1 − u − s (cos²(πu/2) − 1 + u); Black et al. 2024 (arXiv 2410.24164), section IV: Beta.
    """
    if density == "logit_normal":
        return 1.0 / (1.0 + math.exp(-random.normal(arguments.logit_mean, arguments.logit_std)))
    if density == "beta":
        return float(random.beta(arguments.beta_alpha, arguments.beta_beta))
    uniform = float(random.random())
    if density == "uniform":
        return uniform
    return 1.0 - uniform - arguments.mode_scale * (math.cos(math.pi * uniform / 2) ** 2 - 1.0 + uniform)


def shift_sigma(sigma: float, shift: float) -> float:
    """s σ / (1 + (s − 1) σ): more noise for more pixels (Esser et al. 2024, equation 23)."""
    return shift * sigma / (1.0 + (shift - 1.0) * sigma)


def loss_weight(name: str, sigma: float) -> float:
    """Weight of a sample's loss by its noise level.

    sigma_sqrt and cosmap: Esser et al. 2024, section 3.1; bell: exp(−2 (σ − ½)²) − exp(−½), scaled
    to mean 1, as DiffSynth-Studio weights its video models.
    """
    if name == "sigma_sqrt":
        return sigma**-2
    if name == "cosmap":
        return 2.0 / (math.pi * (1.0 - 2.0 * sigma + 2.0 * sigma**2))
    if name == "bell":
        return (math.exp(-2.0 * (sigma - 0.5) ** 2) - _BELL_FLOOR) / _BELL_MEAN
    return 1.0
