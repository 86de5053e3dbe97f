"""Trajectories of a generator from noise to latents, along the path that trains: through the adapter's inputs and
prediction, in the precision of training, so that a step that is computed again while training is the same to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.loss.denoising import noise_of, shift_sigma
from mindspeed_mm.fsdp.loss.sde_steps import SdeSteps, log_prob
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.components import load_component
from mindspeed_mm.fsdp.models.diffusion.velocity import Denoiser
from mindspeed_mm.fsdp.sampling.finite import not_finite


def noise_grid(
    adapter: DiffusionAdapter, latent_shape: tuple[int, ...], steps: int, shift: float | str | None
) -> tuple[float, ...]:
    """Noise levels of a sampler, from 1 down to 0, one more than steps.

    Args:
        adapter: The family.
        latent_shape: (C, H, W) or (C, T, H, W).
        steps: At least one.
        shift: `training.diffusion.shift`; None: the grid is that of the folder's scheduler.
    """
    tokens = adapter.shift_tokens(latent_shape)
    if shift is not None:
        if isinstance(shift, str):
            shift = adapter.resolution_shift(tokens)
        levels = [shift_sigma(1 - index / steps, shift) for index in range(steps)]
        return (*levels, 0.0)
    scheduler = load_component(adapter, "scheduler")
    if scheduler.config.get("use_dynamic_shifting"):
        levels = torch.linspace(1, 1 / steps, steps, dtype=torch.float64).tolist()
        # mu is the logarithm of the shift.
        scheduler.set_timesteps(sigmas=levels, mu=math.log(adapter.released_shift(tokens)))
    else:
        scheduler.set_timesteps(steps)
    return tuple(float(sigma) for sigma in scheduler.sigmas)


@dataclass(frozen=True)
class SampleNoise:
    """What chance decides of one sample of a rollout: a function of what it is, and of nothing around it."""

    seed: int
    prompt: str
    """Of which rollout and prompt."""
    member: int
    """Its number among the samples of the prompt."""
    shares_start: bool = False
    """Whether all samples of the prompt begin with the same noise."""

    def start(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Noise that the trajectory begins with, fp32."""
        if self.shares_start:
            return self._draw("start", shape=shape)
        return self._draw("start", self.member, shape=shape)

    def of_step(self, index: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Noise that a step draws, fp32."""
        return self._draw("step", self.member, index, shape=shape)

    def _draw(self, *of: str | int, shape: tuple[int, ...]) -> torch.Tensor:
        return noise_of(derive_seed(self.seed, "rollout", self.prompt, *of), shape)


@dataclass
class Trajectories:
    """Samples of one micro-batch. States are kept on the host in fp32 (fp64 in fp64): in bf16 a state is off by a
    hundred times what ratios are clipped at."""

    latents: torch.Tensor
    """(B, …) without noise."""
    states: dict[int, torch.Tensor] = field(default_factory=dict)
    """Step → x before it, of the steps that drew noise."""
    samples: dict[int, torch.Tensor] = field(default_factory=dict)
    """Step → x behind it."""
    log_probs: dict[int, torch.Tensor] = field(default_factory=dict)
    """Step → (B,) of the policy that drew them."""
    means: dict[int, torch.Tensor] = field(default_factory=dict)
    """Step → mean of the density that they were drawn from."""

    @property
    def by_step(self) -> dict[str, dict[int, torch.Tensor]]:
        """What is kept of steps, by its name."""
        return {
            "states": self.states,
            "samples": self.samples,
            "log_probs": self.log_probs,
            "means": self.means,
        }

    def of_row(self, row: int) -> Trajectories:
        """That of one sample, without the batch axis."""
        found = Trajectories(self.latents[row])
        for name, kept in self.by_step.items():
            for index, of_all in kept.items():
                found.by_step[name][index] = of_all[row]
        return found

    @classmethod
    def joined(cls, rows: Sequence[Trajectories]) -> Trajectories:
        """Stack the trajectories of single samples along a new batch axis: the inverse of `of_row`."""
        found = cls(torch.stack([row.latents for row in rows]))
        for name, kept in rows[0].by_step.items():
            for index in kept:
                found.by_step[name][index] = torch.stack([row.by_step[name][index] for row in rows])
        return found


@torch.no_grad()
def roll_out(
    denoise: Denoiser,
    model: nn.Module,
    batch: Batch,
    steps: SdeSteps,
    noise: list[SampleNoise],
    drawn: Collection[int] = (),
    own: Callable[[Batch], Batch] = lambda batch: batch,
) -> Trajectories:
    """Sample a micro-batch.

    Args:
        denoise: The path that trains.
        model: The policy.
        batch: Text features and conditions, and `latents` of the shape that is drawn.
        steps: Noise levels, and how noise is drawn.
        noise: Of each sample.
        drawn: Steps that draw noise; the others are the ODE's.
        own: What a rank computes of a batch, on its device.

    Raises:
        NotFiniteError: A state is not finite.
    """
    shape = tuple(batch["latents"].shape[1:])
    x = torch.stack([each.start(shape) for each in noise]).to(denoise.exact_dtype)
    found = Trajectories(x)
    for index in range(len(steps)):
        there = own(batch | {"latents": x})
        state = there["latents"]
        time = torch.full((len(noise),), steps.sigmas[index], dtype=denoise.exact_dtype, device=state.device)
        v = denoise(model, state, time, there)
        if index not in drawn:
            x = steps.ode(state, v, index).cpu()
            _check_finite(x, model, noise, f"the latents after step {index + 1} of {len(steps)}")
            continue
        density = steps.density(state, v, index)
        z = torch.stack([each.of_step(index, shape) for each in noise]).to(density.mean)
        sample = density.mean + density.std * z
        # On the host: a rollout holds the states of all its steps, more than the device has room for.
        found.states[index], found.samples[index] = x, sample.cpu()
        found.log_probs[index], found.means[index] = log_prob(sample, density).cpu(), density.mean.cpu()
        # Just what is kept: the next step begins with the numbers that training computes again from.
        x = found.samples[index]
        _check_finite(x, model, noise, f"the latents after step {index + 1} of {len(steps)}")
    found.latents = x
    return found


def _check_finite(x: torch.Tensor, model: nn.Module, noise: Sequence[SampleNoise], what: str) -> None:
    """Raise `NotFiniteError` for latents (B, …) of the host."""
    finite = x.isfinite().flatten(1).all(dim=1).tolist()
    if not all(finite):
        first = noise[finite.index(False)]
        raise not_finite(what, {"": model}, where=f"sample {first.prompt}/{first.member} of the rollout")
