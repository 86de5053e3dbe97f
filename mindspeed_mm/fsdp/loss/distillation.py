"""Distribution matching distillation (DMD, arXiv 2311.18828; DMD2, arXiv 2405.14867): the difference between what a
critic of the student's samples and a teacher make of them with noise, as a gradient of the samples."""

from __future__ import annotations

import torch


def dmd_gradient(x: torch.Tensor, fake: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """(x̂_fake − x̂_real) / mean |x − x̂_real| of each sample (DMD, equations 7 and 8). Where a sample is exactly what the
    teacher makes of it, there is nothing to divide by, and the gradient is 0. What is not finite stays so.

    Args:
        x: (B, …) samples of the student.
        fake: Clean latents by the critic, given the samples with noise.
        real: The same by the teacher, with its guidance.
    """
    of_sample = (x - real).abs().flatten(1).mean(dim=1).reshape(-1, *[1] * (x.dim() - 1))
    difference = fake - real
    return torch.where(of_sample == 0, torch.zeros_like(difference), difference / of_sample)


def dmd_loss(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """(B,) ½ mean (x − (x − g))² with the inner difference detached: its gradient with respect to x is g over the
    number of latents.

    Args:
        x: (B, …) samples, through which the student is trained.
        gradient: Of `dmd_gradient`.
    """
    target = (x - gradient).detach()
    return 0.5 * (x - target).square().flatten(1).mean(dim=1)
