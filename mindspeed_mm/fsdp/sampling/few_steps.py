"""Draws with a student of few steps, in training and afterwards alike: from noise to a clean sample, noise of the next
level put on it, and so on (the sampler of consistency models, arXiv 2303.01469, section 3), at once or in blocks of
frames (Self-Forcing, arXiv 2506.08009, algorithm 1).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.loss.denoising import noise_of
from mindspeed_mm.fsdp.loss.sde_steps import clean
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.few_steps import CausalModel, FewSteps
from mindspeed_mm.fsdp.models.diffusion.velocity import Denoiser

START, RENOISE, CONTEXT = "_start", "_renoise", "_context"
"""Batch keys of the noise of a drawing: (B, …) at its start; (B, steps − 1, …) that each further step puts on; (B, …)
of finished blocks."""


def student_shift(adapter: DiffusionAdapter, few: FewSteps, latent_shape: tuple[int, ...]) -> float:
    """s of the noise levels for latents (C, H, W) or (C, T, H, W)."""
    if isinstance(few.shift, int | float):
        return float(few.shift)
    tokens = adapter.shift_tokens(latent_shape)
    if few.shift == "resolution":
        return adapter.resolution_shift(tokens)
    return adapter.released_shift(tokens)


def student_noise(seeds: Sequence[int], few: FewSteps, latent_shape: Sequence[int]) -> dict[str, torch.Tensor]:
    """All noise of a drawing, of each sample by its own seed: it depends on nothing around it."""
    started: list[torch.Tensor] = []
    put_on: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    further = len(few.denoising_step_list) - 1
    for seed in seeds:
        started.append(noise_of(seed, latent_shape))
        steps = [noise_of(derive_seed(seed, "step", index), latent_shape) for index in range(further)]
        put_on.append(torch.stack(steps) if steps else torch.zeros(0, *latent_shape))
        if few.context_noise:
            kept.append(noise_of(derive_seed(seed, "context"), latent_shape))
    found = {START: torch.stack(started), RENOISE: torch.stack(put_on)}
    if kept:
        return found | {CONTEXT: torch.stack(kept)}
    return found


@dataclass(frozen=True)
class StudentDrawing:
    """Draws clean latents.

    Args:
        denoise: The path through the transformer.
        few: Levels and blocks.
    """

    denoise: Denoiser
    few: FewSteps

    def __call__(self, model: nn.Module, batch: Batch, exits: Sequence[int] | None = None) -> torch.Tensor:
        """x₀ (B, …). Each block's last step has gradients where they are on; the steps before, and what later blocks
        see, have none.

        Args:
            model: The transformer.
            batch: Text features, and `student_noise`, on the model's device.
            exits: Number of the step, from 0, that each block ends at; None: the last one.

        Raises:
            DataError: The frames are no whole number of blocks.
        """
        start = batch[START].to(self.denoise.exact_dtype)
        shape = tuple(start.shape[1:])
        levels = self.few.levels(student_shift(self.denoise.adapter, self.few, shape))
        if exits is None:
            exits = [len(levels) - 1] * len(self.spans(shape))
        if self.few.num_frame_per_block is None:
            return self._drawn(model, batch, slice(None), levels[: exits[0] + 1], nullcontext)
        causal = self.denoise.adapter.causal(model)
        pieces: list[torch.Tensor] = []
        spans = self.spans(shape)
        with causal.opened():
            for number, (first, end) in enumerate(spans):
                frames, own = slice(first, end), _Placed(causal, first)
                piece = self._drawn(model, batch, frames, levels[: exits[number] + 1], own)
                pieces.append(piece)
                if number < len(spans) - 1:
                    self._keep(model, batch, frames, piece.detach(), own)
        return torch.cat(pieces, dim=2)

    def predicted(self, model: nn.Module, batch: Batch, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """x₀ (B, …) of samples whose blocks stand at levels of their own, each seen by later ones as it stands
        (diffusion forcing, arXiv 2407.01392): what one pass with a mask over blocks gives, with all its gradients.

        Args:
            model: The transformer.
            batch: Text features, on the model's device.
            x: (B, …) with noise.
            time: (B, blocks) noise levels.
        """
        x = x.to(self.denoise.exact_dtype)
        if self.few.num_frame_per_block is None:
            return self._clean(model, batch, x, time[:, 0], nullcontext())
        causal, spans = self.denoise.adapter.causal(model), self.spans(tuple(x.shape[1:]))
        pieces: list[torch.Tensor] = []
        with causal.opened():
            for number, (first, end) in enumerate(spans):
                own = causal.block(first, keeps=number < len(spans) - 1)
                pieces.append(self._clean(model, batch, x[:, :, first:end], time[:, number], own))
        return torch.cat(pieces, dim=2)

    def spans(self, latent_shape: Sequence[int]) -> list[tuple[int, int]]:
        """First frame and end of each block of latents (C, T, H, W); one of all where they are drawn at once.

        Raises:
            DataError: The frames are no whole number of blocks.
        """
        if self.few.num_frame_per_block is None:
            return [(0, 1)]
        return self.few.blocks(latent_shape[1])

    def _drawn(
        self,
        model: nn.Module,
        batch: Batch,
        frames: slice,
        levels: Sequence[float],
        own: Callable[[], AbstractContextManager[None]],
    ) -> torch.Tensor:
        """x₀ of some frames, by the steps of `levels`."""
        exact = self.denoise.exact_dtype
        x = _of_frames(batch[START], frames).to(exact)
        with torch.no_grad():
            for index, (level, following) in enumerate(itertools.pairwise(levels)):
                x0 = self._clean(model, batch, x, _times(level, x), own())
                noise = _of_frames(batch[RENOISE][:, index], frames).to(exact)
                x = self.denoise.adapter.noise_path.mix(x0, noise, _like(following, x))
        return self._clean(model, batch, x, _times(levels[-1], x), own())

    def _clean(
        self, model: nn.Module, batch: Batch, x: torch.Tensor, time: torch.Tensor, place: AbstractContextManager[None]
    ) -> torch.Tensor:
        """x₀ of x at noise levels (B,)."""
        with place:
            v = self.denoise(model, x, time, batch)
        return clean(x, v, time.view(-1, *[1] * (x.dim() - 1)))

    @torch.no_grad()
    def _keep(self, model: nn.Module, batch: Batch, frames: slice, piece: torch.Tensor, own: _Placed) -> None:
        """Let the blocks behind see a finished one, at the noise level of context."""
        level = self.few.context_noise / 1000
        if level:
            noise = _of_frames(batch[CONTEXT], frames).to(piece.dtype)
            piece = self.denoise.adapter.noise_path.mix(piece, noise, _like(level, piece))
        with own(keeps=True):
            self.denoise(model, piece, _times(level, piece), batch)


@dataclass(frozen=True)
class _Placed:
    """Opens the place of one block."""

    causal: CausalModel
    first: int

    def __call__(self, *, keeps: bool = False) -> AbstractContextManager[None]:
        return self.causal.block(self.first, keeps=keeps)


def _of_frames(latents: torch.Tensor, frames: slice) -> torch.Tensor:
    """Some frames of (B, C, T, H, W); all of (B, C, H, W)."""
    if frames == slice(None):
        return latents
    return latents[:, :, frames]


def _times(level: float, x: torch.Tensor) -> torch.Tensor:
    """(B,) times of a batch, all at one noise level."""
    return torch.full((len(x),), level, dtype=x.dtype, device=x.device)


def _like(level: float, x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(level, dtype=x.dtype, device=x.device)
