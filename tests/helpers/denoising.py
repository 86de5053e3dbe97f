"""Sampling written out with what an adapter says of its family, to be compared with the family's own pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter


@torch.no_grad()
def denoise(
    adapter: DiffusionAdapter,
    pipeline: Any,
    latents: torch.Tensor,
    batch: Batch,
    *,
    steps: int,
    guidance: float = 3.5,
    unguided: Batch | None = None,
) -> torch.Tensor:
    """Latents after `steps` of the folder's scheduler.

    Args:
        adapter: Says what the transformer takes and returns.
        pipeline: Whole, with transformer and scheduler.
        latents: Noise.
        batch: Text features and conditions.
        steps: Of the scheduler.
        guidance: Of the transformer's input, and of classifier-free guidance when `unguided` is given.
        unguided: The same with the negative prompt.
    """

    def velocity(features: Batch, sigma: torch.Tensor) -> torch.Tensor:
        output = pipeline.transformer(**adapter.inputs(latents, sigma, features, guidance), return_dict=False)
        return adapter.prediction(output, tuple(latents.shape))

    scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config)
    for time in _timesteps(adapter, scheduler, latents, steps):
        sigma = (time.double() / 1000).expand(len(latents))
        predicted = velocity(batch, sigma)
        if unguided is not None:
            other = velocity(unguided, sigma)
            predicted = other + guidance * (predicted - other)
        latents = scheduler.step(predicted, time, latents, return_dict=False)[0]
    return latents


def text_batch(adapter: DiffusionAdapter, pipeline: Any, captions: Sequence[str]) -> Batch:
    """Captions as a batch has them."""
    return adapter.pad_text(adapter.encode_text(pipeline, captions))


def _timesteps(adapter: DiffusionAdapter, scheduler: Any, latents: torch.Tensor, steps: int) -> torch.Tensor:
    if not scheduler.config.get("use_dynamic_shifting"):
        scheduler.set_timesteps(steps)
        return scheduler.timesteps
    tokens = adapter.geometry.tokens(tuple(latents.shape[1:]))
    sigmas = torch.linspace(1, 1 / steps, steps, dtype=torch.float64).tolist()
    scheduler.set_timesteps(sigmas=sigmas, mu=math.log(adapter.released_shift(tokens)))
    return scheduler.timesteps
