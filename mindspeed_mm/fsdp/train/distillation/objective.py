"""What student and critic are trained for by `posttrain.method: dmd`.

The student draws samples of its own and learns by `loss/distillation.py`; the critic learns to denoise them. What
chance decides of a sample is a function of (seed, epoch, sample id), and at which step an update ends of (seed, number
of the update): the same for every number of ranks, and for a run that is resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.loss.denoising import noise_of, real_rows
from mindspeed_mm.fsdp.loss.distillation import dmd_gradient, dmd_loss
from mindspeed_mm.fsdp.loss.objectives import BatchTokens, Terms
from mindspeed_mm.fsdp.loss.sde_steps import clean
from mindspeed_mm.fsdp.models.diffusion.adapter import LATENTS
from mindspeed_mm.fsdp.models.diffusion.velocity import Denoiser, GuidedDenoiser, blank_text
from mindspeed_mm.fsdp.params.posttrain_args import DmdArguments
from mindspeed_mm.fsdp.sampling.few_steps import START, StudentDrawing, student_noise, student_shift

STUDENT, CRITIC = "dmd", "critic/loss"
"""Terms: of the student, and of the critic, which is no part of what the student minimises."""


@dataclass(frozen=True)
class Teacher:
    """The model whose distribution the student learns."""

    entered: Callable[[], AbstractContextManager[Any]]
    """Makes the student's model the teacher while it is entered, or gives another model."""
    denoise: Denoiser
    """With the teacher's guidance."""
    described: str = ""
    """Which model it is, for the log."""


class DistillationObjective:
    """Losses of the student, and of its critic.

    Args:
        student: How the student draws.
        teacher: Is never trained.
        critic: Has learned, and goes on learning, what the student draws.
        arguments: `posttrain.dmd`.
        seed: `training.seed`.
        micro_batches: Of an update, on each rank.
        encode: Raw batch → latents and text features by batch key; features are taken as they are.
        blank: Features of the prompt that guidance leads away from, of one sample; None: there is no guidance.
    """

    def __init__(
        self,
        student: StudentDrawing,
        teacher: Teacher,
        critic: nn.Module,
        arguments: DmdArguments,
        *,
        seed: int,
        micro_batches: int,
        encode: Callable[[Batch], Batch],
        blank: Mapping[str, torch.Tensor] | None,
    ) -> None:
        self._student, self._teacher, self._critic = student, teacher, critic
        self._arguments, self._seed, self._micro_batches = arguments, seed, micro_batches
        self._encode, self._blank = encode, blank
        self._adapter = student.denoise.adapter
        self._update = (STUDENT, 0)

    # --- what the engine asks -----------------------------------------------------------------------------------------

    def prepare(self, batch: Batch, *, training: bool = True) -> Batch:
        """Encode what is raw, and draw what chance decides: `student_noise`, `_noise` and `_time` of the samples when
        teacher and critic look at them; with guidance the features of no prompt, too."""
        prepared = dict(self._encode(batch))
        shape = tuple(prepared[LATENTS].shape[1:])
        seeds: list[int] = []
        times: list[float] = []
        noise: list[torch.Tensor] = []
        for sample, epoch in zip(batch["sample_ids"], batch["epochs"], strict=True):
            seed = derive_seed(self._seed, "dmd", epoch, sample)
            seeds.append(seed)
            times.append(self._time(seed, shape))
            noise.append(noise_of(derive_seed(seed, "score"), shape))
        exact = self._student.denoise.exact_dtype
        prepared |= student_noise(seeds, self._student.few, shape)
        prepared["_noise"] = torch.stack(noise)
        prepared["_time"] = torch.tensor(times, dtype=torch.float64).to(exact)
        prepared["_weights"] = torch.ones(len(seeds), dtype=exact)  # for forecasts, which take it for denoising
        if self._blank is not None:
            rows = {key: value.expand(len(seeds), *value.shape[1:]) for key, value in self._blank.items()}
            prepared |= blank_text(rows)
        return prepared

    def count(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Samples of the student's update, which are the last of a step, and of the critic's; without blank rows."""
        sizes = list(map(real_rows, batches))
        own = float(sum(sizes[-self._micro_batches :]))
        return {STUDENT: own, CRITIC: sum(sizes) - own}

    def tokens(self, batch: Batch) -> BatchTokens:
        """Count the latent tokens of all samples, each of which is trained."""
        each = self._adapter.geometry.tokens(tuple(batch[LATENTS].shape[1:]))
        whole = each * len(batch["sample_ids"])
        return BatchTokens(whole, whole)

    def describe(self) -> str:
        """Return a phrase for the log: steps, blocks and updates of the critic."""
        few, dmd = self._student.few, self._arguments
        blocks = ""
        if few.num_frame_per_block:
            blocks = f", blocks of {few.num_frame_per_block} latent frames"
        return (
            f"distribution matching into {len(few.denoising_step_list)} steps{blocks}; the teacher is "
            f"{self._teacher.described}, guided by {dmd.guidance_scale:g}; {dmd.dfake_gen_update_ratio} updates of the "
            "critic a step"
        )

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        """The student's loss, a sum over samples."""
        x = self._student(model, batch, self._exits(batch))
        with torch.no_grad():
            # Teacher and critic only say which way the sample should move: the student's loss trains neither.
            gradient = self._gradient(x.detach(), batch)
        return {STUDENT: dmd_loss(x, gradient)[: real_rows(batch)].sum()}

    # --- for the step -------------------------------------------------------------------------------------------------

    def begin(self, term: str, number: int) -> None:
        """Say which update comes: it decides at which step samples end.

        Args:
            term: `STUDENT` or `CRITIC`.
            number: Of this kind, from 0, over the whole run.
        """
        self._update = (term, number)

    def critic_loss(self, student: nn.Module, batch: Batch) -> torch.Tensor:
        """Flow matching of the critic on samples of the student: a sum over samples of means over latents."""
        with torch.no_grad():
            x = self._student(student, batch, self._exits(batch))
        noise = batch["_noise"].to(x.dtype)
        predicted = self._student.denoise(self._critic, self._noised(x, batch), batch["_time"], batch)
        # noise - x is the velocity of the straight path from the sample to its noise.
        errors = (predicted - (noise - x)).square().flatten(1).mean(dim=1)
        return errors[: real_rows(batch)].sum()

    # --- its parts ----------------------------------------------------------------------------------------------------

    def _gradient(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        noisy, time = self._noised(x, batch), batch["_time"]
        # (batch, 1, …), for the broadcast over latents.
        level = time.view(-1, *[1] * (x.dim() - 1))
        # What the sample would be without its noise: by the student's distribution, and by the teacher's.
        fake = clean(noisy, self._student.denoise(self._critic, noisy, time, batch), level)
        with self._teacher.entered() as model:
            real = clean(noisy, self._teacher.denoise(model, noisy, time, batch), level)
        return dmd_gradient(x, fake, real)

    def _noised(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        time = batch["_time"].view(-1, *[1] * (x.dim() - 1))
        return self._adapter.noise_path.mix(x, batch["_noise"].to(x.dtype), time)

    def _exits(self, batch: Batch) -> list[int]:
        """Number of the step that each block ends at."""
        blocks = len(self._student.spans(tuple(batch[START].shape[1:])))
        steps = len(self._arguments.denoising_step_list)
        if self._arguments.last_step_only:
            return [steps - 1] * blocks
        if self._arguments.same_step_across_blocks:
            return [derive_seed(self._seed, "exit", *self._update) % steps] * blocks
        return [derive_seed(self._seed, "exit", *self._update, block) % steps for block in range(blocks)]

    def _time(self, seed: int, shape: tuple[int, ...]) -> float:
        """The noise level at which a sample is looked at: uniform, shifted, moved into the range."""
        random = np.random.Generator(np.random.Philox(key=derive_seed(seed, "level")))
        shift, share = student_shift(self._adapter, self._student.few, shape), float(random.random())
        low, high = self._arguments.score_range
        return min(max(shift * share / (1.0 + (shift - 1.0) * share), low), high)


def teachers_path(denoise: Denoiser, scale: float) -> Denoiser:
    """The path through the teacher: guided by a second pass, or told the scale where it takes it as an input.

    Args:
        denoise: The student's.
        scale: `posttrain.dmd.guidance_scale`.
    """
    if denoise.adapter.takes_guidance:
        return replace(denoise, guidance=scale)
    if scale == 1:
        return denoise
    return GuidedDenoiser(denoise.adapter, denoise.compute_dtype, denoise.guidance, scale)
