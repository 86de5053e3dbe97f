"""Measures of generated pictures, in fp64: distances of feature distributions, and likeness of pairs; and measured
values as results hold them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mindspeed_mm.fsdp.sampling.answers.scoring import bootstrap_interval

_WINDOW, _SIGMA = 11, 1.5
_K1, _K2 = 0.01, 0.03


def frechet_distance(a_NF: torch.Tensor, b_NF: torch.Tensor) -> float:
    """|μa - μb|² + tr(Σa + Σb - 2 √(Σa Σb)) of two sets of features (Heusel et al. 2017, arXiv 1706.08500, section 2);
    with Inception's pool3 features it is FID.

    Raises:
        ValueError: A set has fewer than two rows.
    """
    a_NF, b_NF = a_NF.double(), b_NF.double()
    if min(len(a_NF), len(b_NF)) < 2:
        raise ValueError("a covariance needs two rows")
    means = (a_NF.mean(0) - b_NF.mean(0)).square().sum()
    a_FF = torch.atleast_2d(torch.cov(a_NF.T))
    b_FF = torch.atleast_2d(torch.cov(b_NF.T))
    # Eigenvalues of the product are real and not negative, but for rounding; the trace of its root is their roots' sum.
    roots = torch.linalg.eigvals(a_FF @ b_FF).real.clamp(min=0).sqrt().sum()
    return float(means + a_FF.trace() + b_FF.trace() - 2 * roots)


def kernel_distance(a_NF: torch.Tensor, b_NF: torch.Tensor) -> float:
    """Unbiased squared maximum mean discrepancy with the kernel (x·y / F + 1)³, over all rows (Bińkowski et al. 2018,
    arXiv 1801.01401, section 4); with Inception's pool3 features it is KID. It may be a little below zero.

    Raises:
        ValueError: A set has fewer than two rows.
    """
    a_NF, b_NF = a_NF.double(), b_NF.double()
    if min(len(a_NF), len(b_NF)) < 2:
        raise ValueError("an unbiased estimate needs two rows")

    def kernel(x_NF: torch.Tensor, y_MF: torch.Tensor) -> torch.Tensor:
        return (x_NF @ y_MF.T / x_NF.shape[1] + 1) ** 3

    def within(x_NF: torch.Tensor) -> torch.Tensor:
        k_NN, n = kernel(x_NF, x_NF), len(x_NF)
        return (k_NN.sum() - k_NN.trace()) / (n * (n - 1))

    return float(within(a_NF) + within(b_NF) - 2 * kernel(a_NF, b_NF).mean())


def psnr(a_CHW: torch.Tensor, b_CHW: torch.Tensor) -> float:
    """10 log₁₀(1 / mean squared error) of two pictures with values from 0 to 1, in dB; infinite of equal ones."""
    error = float((a_CHW.double() - b_CHW.double()).square().mean())
    if error:
        return 10 * math.log10(1 / error)
    return math.inf


def ssim(a_CHW: torch.Tensor, b_CHW: torch.Tensor) -> float:
    """Mean structural similarity of two pictures with values from 0 to 1 (Wang et al. 2004, IEEE TIP 13): Gaussian
    windows of 11×11 pixels with σ 1.5 that lie inside the picture, mean over channels.

    Raises:
        ValueError: The pictures are smaller than a window.
    """
    if min(a_CHW.shape[-2:]) < _WINDOW:
        size = f"{a_CHW.shape[-1]}×{a_CHW.shape[-2]}"
        raise ValueError(f"has {size} pixels, smaller than a window of {_WINDOW}×{_WINDOW}")
    a, b = a_CHW.double().unsqueeze(1), b_CHW.double().unsqueeze(1)
    offsets = torch.arange(_WINDOW, dtype=torch.float64) - _WINDOW // 2
    line = torch.exp(-(offsets**2) / (2 * _SIGMA**2))
    line = line / line.sum()
    window = (line[:, None] * line).expand(1, 1, _WINDOW, _WINDOW)

    def mean(x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, window)

    mean_a, mean_b = mean(a), mean(b)
    var_a, var_b, cov = mean(a * a) - mean_a**2, mean(b * b) - mean_b**2, mean(a * b) - mean_a * mean_b
    c1, c2 = _K1**2, _K2**2
    likeness = (2 * mean_a * mean_b + c1) * (2 * cov + c2) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    return float(likeness.mean())


# --- values with their intervals --------------------------------------------------------------------------------------

Measured = dict[str, Any]
"""`value`, None where it is infinite; of means `n`, and `low` and `high`, the bounds of a 95 % interval;
of PSNR also `identical`, the number of pairs that are left out of it, where there are any."""


def mean_of(values: Sequence[float], weights: Sequence[float] | None = None) -> Measured:
    """The mean of samples, with the interval of samples drawn with replacement.

    Args:
        values: Of each sample.
        weights: How much each counts; None: alike.
    """
    if not all(map(math.isfinite, values)):  # JSON has no infinity
        return {"value": None, "n": len(values)}
    units = np.ones(len(values)) if weights is None else np.array(weights, dtype=float)
    sums = np.array(values) * units
    low, high = bootstrap_interval(sums, units)
    return {"value": float(sums.sum() / units.sum()), "n": len(values), "low": low, "high": high}


def told(name: str, one: Measured) -> str:
    """Return a measure as one line of text: its name, value and, for means, number of samples and 95 % interval."""
    value = "infinite" if one["value"] is None else f"{one['value']:.5g}"
    text = f"{name}: {value}"
    if "low" in one:
        text += f" (n={one['n']}, 95 % interval {one['low']:.5g} to {one['high']:.5g})"
    if count := one.get("identical", 0):
        pairs = "pair" if count == 1 else "pairs"
        text += f"; {count} identical {pairs} left out"
    return text
