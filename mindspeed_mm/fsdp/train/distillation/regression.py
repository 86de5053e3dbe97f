"""Fits a student to stored trajectories of its teacher: what it makes of each state should be the clean end
(`posttrain.dmd.objective: ode_regression`; CausVid, arXiv 2412.07772, section 4.3).

Each block of a sample stands at one of the student's levels, or is clean and only looked at by later blocks: what the
student makes of that is the block itself, so that it has no error. The levels are a function of (seed, epoch, sample
id).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from typing_extensions import override

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.loss.denoising import real_rows
from mindspeed_mm.fsdp.loss.objectives import BatchTokens, Terms
from mindspeed_mm.fsdp.models.diffusion.adapter import LATENTS, DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.few_steps import FewSteps
from mindspeed_mm.fsdp.models.diffusion.velocity import Denoiser
from mindspeed_mm.fsdp.params.argument import ModelArguments, PosttrainArguments, TrainingArguments
from mindspeed_mm.fsdp.sampling.few_steps import StudentDrawing, student_shift
from mindspeed_mm.fsdp.train.distillation.build import Captions, encoder_of
from mindspeed_mm.fsdp.train.distillation.trajectories import TrajectoryFolder, identities
from mindspeed_mm.fsdp.train.run.data import RunData

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

ODE = "ode"
"""The term: squared error of x̂₀, a mean over latents and over the blocks that have noise."""


class TrajectoryRegression:
    """The student's loss on trajectories.

    Args:
        student: How it draws.
        folder: The trajectories.
        seed: `training.seed`.
        encode: Raw batch → latents in the size of the sample, and text features; features are taken as they are.
    """

    def __init__(
        self,
        student: StudentDrawing,
        folder: TrajectoryFolder,
        *,
        seed: int,
        encode: Callable[[Batch], Batch],
    ) -> None:
        self._student, self._folder, self._seed, self._encode = student, folder, seed, encode
        self._adapter = student.denoise.adapter

    def prepare(self, batch: Batch, *, training: bool = True) -> Batch:
        """Encode what is raw, and read the trajectories. Adds `_noisy` (B, …), each block at the level in `_time`
        (B, blocks); `_clean` (B, …)."""
        names = identities(batch)
        prepared = dict(self._encode(batch))
        shape = tuple(prepared[LATENTS].shape[1:])
        spans, few = self._student.spans(shape), self._student.few
        # The student's, falling, and behind them the clean end.
        levels = (*few.levels(student_shift(self._adapter, few, shape)), 0.0)
        noisy: list[torch.Tensor] = []
        ends: list[torch.Tensor] = []
        times: list[list[float]] = []
        for name, sample, epoch in zip(names, batch["sample_ids"], batch["epochs"], strict=True):
            states = self._folder.read(name, str(sample), (len(levels), *shape))
            chosen = self._levels(epoch, sample, len(levels) - 1, len(spans))
            pieces = [states[chosen[0]]]
            if few.num_frame_per_block is not None:
                # States are (channels, frames, height, width): each block comes from the one at its level.
                pieces = [states[at][:, first:end] for at, (first, end) in zip(chosen, spans, strict=True)]
            noisy.append(torch.cat(pieces, dim=1))
            ends.append(states[-1])
            times.append([levels[at] for at in chosen])
        exact = self._student.denoise.exact_dtype
        time = torch.tensor(times, dtype=torch.float64)
        prepared |= {"_noisy": torch.stack(noisy).to(exact), "_clean": torch.stack(ends).to(exact)}
        return prepared | {"_time": time.to(exact)}

    def _levels(self, epoch: int, sample: str, steps: int, blocks: int) -> list[int]:
        """Number of the level of each block, uniform; that of the clean end is `steps`, which nobody would look at in
        the last block."""
        random = np.random.Generator(np.random.Philox(key=derive_seed(self._seed, "ode", epoch, sample)))
        drawn = random.integers(0, [steps + 1] * (blocks - 1) + [steps])
        return [int(number) for number in drawn]

    def count(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Blocks that have noise; without blank rows."""
        return {ODE: float(sum((batch["_time"][: real_rows(batch)] > 0).sum() for batch in batches))}

    def tokens(self, batch: Batch) -> BatchTokens:
        """Count the latent tokens of all samples; those of clean blocks are not trained."""
        whole = self._adapter.geometry.tokens(tuple(batch[LATENTS].shape[1:])) * len(batch["sample_ids"])
        return BatchTokens(whole, round(whole * float((batch["_time"] > 0).double().mean())))

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        """The squared errors, a sum over blocks that have noise of means over latents."""
        found = self._student.predicted(model, batch, batch["_noisy"], batch["_time"])
        errors = (found - batch["_clean"].to(found.dtype)).square()
        if self._student.few.num_frame_per_block is not None:
            errors = errors.transpose(1, 2)  # frames in front
        # → (batch, blocks); a sample that is drawn at once is one block.
        of_blocks = errors.unflatten(1, (batch["_time"].shape[1], -1)).flatten(2).mean(dim=2)
        return {ODE: of_blocks[: real_rows(batch)].sum()}

    def describe(self) -> str:
        """Return a phrase for the log: steps, blocks and where the trajectories are."""
        few = self._student.few
        blocks = ""
        if few.num_frame_per_block:
            blocks = f", blocks of {few.num_frame_per_block} latent frames"
        return (
            f"regression into {len(few.denoising_step_list)} steps{blocks}, on the teacher's trajectories in "
            f"{self._folder.path}"
        )


def build_regression(
    model: ModelArguments,
    training: TrainingArguments,
    posttrain: PosttrainArguments,
    data: RunData,
    *,
    denoise: Denoiser,
    encoders: Callable[[], DiffusionPipeline],
) -> TrajectoryRegression:
    """The student and its teacher's trajectories.

    Args:
        model: The folder of the teacher, unless `posttrain` names one.
        training: The seed, and weights to start from.
        posttrain: The student's steps, and where the trajectories are.
        data: What gives captions.
        denoise: The path through the student.
        encoders: Gives the frozen encoders, which are loaded when they are asked for first.

    Raises:
        ConfigError: There are no trajectories, or they are another teacher's.
    """
    adapter = denoise.adapter
    adapter.note_components(data.train.noted_components)
    assert adapter.few_steps is not None
    folder = TrajectoryFolder.of_run(model, training, posttrain)
    folder.check()
    captions = Captions(adapter, encoders) if data.train.is_raw else None
    return TrajectoryRegression(
        StudentDrawing(denoise, adapter.few_steps),
        folder,
        seed=training.seed,
        encode=encoder_of(adapter, captions, encoders),
    )


class BlankTrajectories(TrajectoryFolder):
    """States of zeros, for forecasts."""

    @override
    def read(self, identity: str, sample: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape)


def simulated_regression(
    model: ModelArguments,
    training: TrainingArguments,
    posttrain: PosttrainArguments,
    adapter: DiffusionAdapter,
    compute_dtype: torch.dtype,
) -> TrajectoryRegression:
    """The regression without trajectories, whose batches are of the same shapes.

    Args:
        training: The seed, and the guidance that the model is told.
        posttrain: The student's steps.
        adapter: The family.
        compute_dtype: What the transformer computes in.
    """
    few = FewSteps.of_run(training, posttrain)
    assert few is not None
    student = StudentDrawing(Denoiser(adapter, compute_dtype, training.diffusion.guidance), few)
    return TrajectoryRegression(student, BlankTrajectories(Path(), {}), seed=training.seed, encode=dict)
