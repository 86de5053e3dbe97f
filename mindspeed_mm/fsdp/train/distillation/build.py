"""Builds what a distillation is trained for: student, teacher and critic, and where their captions come from."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.fsdp.data import MMDataset
from mindspeed_mm.fsdp.loss.denoising import real_rows
from mindspeed_mm.fsdp.models.diffusion.adapter import LATENTS, DiffusionAdapter, TextFeatures
from mindspeed_mm.fsdp.models.diffusion.components import load_encoders
from mindspeed_mm.fsdp.models.diffusion.live_encoding import LiveEncoder
from mindspeed_mm.fsdp.models.diffusion.velocity import Denoiser, GuidedDenoiser
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.sampling.few_steps import StudentDrawing
from mindspeed_mm.fsdp.train.assemble import Assembled
from mindspeed_mm.fsdp.train.distillation.objective import DistillationObjective, Teacher, teachers_path
from mindspeed_mm.fsdp.train.distillation.trajectories import TrajectoryFolder, TrajectoryWriter
from mindspeed_mm.fsdp.train.reference import assemble_reference, describe_reference
from mindspeed_mm.fsdp.train.rollouts.flow import generator_reference
from mindspeed_mm.fsdp.train.run.data import RunData, build_data, build_pass_loader
from mindspeed_mm.fsdp.train.run.job import Job, joined
from mindspeed_mm.fsdp.train.run.start_checks import check_encoders
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype
from mindspeed_mm.fsdp.utils.work_progress import WorkProgress

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_CAPTIONS_KEPT = 1024
"""Features of the captions that were seen last are kept on the host."""


def build_distillation(
    arguments: Arguments,
    assembled: Assembled,
    job: Job,
    data: RunData,
    *,
    denoise: Denoiser,
    encoders: Callable[[], DiffusionPipeline],
) -> DistillationObjective:
    """Student, teacher and critic. The samples of the data give captions and sizes alone.

    Args:
        arguments: The whole configuration.
        assembled: The student, with its critic.
        job: This rank.
        data: What gives captions.
        denoise: The path through the student.
        encoders: Gives the frozen encoders, which are loaded when they are asked for first.

    Raises:
        MMError: There is no such teacher, or nothing that it is guided away from.
    """
    training, dmd, adapter = arguments.training, arguments.posttrain.dmd, denoise.adapter
    few, reference = adapter.few_steps, generator_reference(arguments, assembled, job.device)
    assert few is not None and reference is not None and assembled.critic is not None
    adapter.note_components(data.train.noted_components)
    captions = Captions(adapter, encoders) if data.train.is_raw else None
    guided = teachers_path(denoise, dmd.guidance_scale)
    blank = None
    if isinstance(guided, GuidedDenoiser):
        blank = _blank(data.train, captions, dmd.negative_prompt)

    @contextmanager
    def teacher() -> Iterator[nn.Module]:
        with reference() as other:
            # Switched adapters and averages change the model in place, and give no other one.
            yield assembled.model if other is None else other

    return DistillationObjective(
        StudentDrawing(denoise, few),
        Teacher(teacher, guided, describe_reference(arguments)),
        assembled.critic.model,
        dmd,
        seed=training.seed,
        micro_batches=training.gradient_accumulation_steps,
        encode=encoder_of(adapter, captions, encoders),
        blank=blank,
    )


def store_trajectories(arguments: Arguments) -> int:
    """Draw the teacher's trajectory of each sample of the data, and return how many samples there are. Called by every
    rank; the first one tells on stderr how far it is.

    Args:
        arguments: The whole configuration.

    Raises:
        MMError: Model or data are off, or the folder holds another teacher's.
    """
    dmd = arguments.posttrain.dmd
    folder = TrajectoryFolder.of_run(arguments.model, arguments.training, arguments.posttrain)
    with joined(arguments) as job:
        data = build_data(arguments.data, arguments.training, arguments.posttrain, job)
        check_encoders((data.train,))
        folder.open()
        loader = build_pass_loader(arguments.data, arguments.training, job.data_share, data.train)
        with job.setup("building the teacher"):
            teacher = assemble_reference(arguments, job.device).model
        adapter = facts_of(teacher).adapter
        assert adapter is not None
        adapter.note_components(data.train.noted_components)
        compute = torch_dtype(arguments.parallel.fsdp_plan.computed_in)
        denoise = Denoiser(adapter, compute, arguments.training.diffusion.guidance)
        # Loaded once, and only if something is encoded.
        encoders = cache(partial(load_encoders, adapter, job.device))
        captions = Captions(adapter, encoders) if data.train.is_raw else None
        guided, blank = teachers_path(denoise, dmd.guidance_scale), None
        if isinstance(guided, GuidedDenoiser):
            blank = _blank(data.train, captions, dmd.negative_prompt)
        encode = encoder_of(adapter, captions, encoders)
        sections = arguments.training, arguments.posttrain
        write = TrajectoryWriter(folder, guided, teacher, *sections, encode=encode, blank=blank, device=job.device)
        total, ranks = len(data.train), job.data_share.ranks
        progress = WorkProgress("trajectories", total=math.ceil(total / ranks), rank=job.rank, world_size=ranks)
        for batch in itertools.chain.from_iterable(loader.one_pass()):
            write(batch)
            progress.advance(real_rows(batch))
        progress.end()
    return total


class Captions:
    """Raw batches → features of their captions, and latents of zeros in the size of their media, which nobody looks at.

    Args:
        adapter: The family.
        encoders: Gives them.
    """

    def __init__(self, adapter: DiffusionAdapter, encoders: Callable[[], DiffusionPipeline]) -> None:
        self._adapter, self._encoders = adapter, encoders
        self._kept: OrderedDict[str, TextFeatures] = OrderedDict()

    def __call__(self, batch: Batch) -> Batch:
        """The batch with `latents` and text features in place of `pixels` and `captions`."""
        rows, _, *sides = batch["pixels"].shape
        latents = torch.zeros(rows, *self._adapter.geometry.latent_shape(MediaSize(*sides)))
        kept = {key: value for key, value in batch.items() if key not in ("pixels", "captions")}
        return kept | {LATENTS: latents} | self._adapter.pad_text(list(map(self.features, batch["captions"])))

    def features(self, caption: str) -> TextFeatures:
        """Of one caption, on the host."""
        if caption not in self._kept:
            (found,) = self._adapter.encode_text(self._encoders(), [caption])
            self._kept[caption] = {key: value.cpu() for key, value in found.items()}
        # The caption that was not asked for longest is forgotten first.
        self._kept.move_to_end(caption)
        if len(self._kept) > _CAPTIONS_KEPT:
            self._kept.popitem(last=False)
        return self._kept[caption]

    def padded(self, caption: str) -> dict[str, torch.Tensor]:
        """(1, …) as they stand in a batch."""
        return dict(self._adapter.pad_text([self.features(caption)]))


def encoder_of(
    adapter: DiffusionAdapter, captions: Captions | None, encoders: Callable[[], DiffusionPipeline]
) -> Callable[[Batch], Batch]:
    """Raw batch → latents, text features and conditions; features are taken as they are.

    Args:
        adapter: The family.
        captions: Encodes raw captions; None: the data are features.
        encoders: Gives what the media of rows are encoded with.
    """
    if captions is None:
        return dict
    if not adapter.media_roles:
        return captions
    live = LiveEncoder(adapter, encoders())

    def with_conditions(batch: Batch) -> Batch:
        kept = {key: value for key, value in batch.items() if key != "captions" and not key.startswith("pixels")}
        return kept | live(batch)

    return with_conditions


def _blank(data: MMDataset, captions: Captions | None, prompt: str) -> dict[str, torch.Tensor]:
    """Features (1, …) of what guidance leads away from.

    Raises:
        ConfigError: Features hold no empty caption, or another prompt is asked for than that.
    """
    if captions is not None:
        return captions.padded(prompt)
    if prompt:
        raise ConfigError(
            f"'{prompt}', but the data are features, which hold the empty prompt alone",
            key="posttrain.dmd.negative_prompt",
            way_out="Leave it out, or train on prompts or raw media, whose captions are encoded while training.",
        )
    empty = data.null_text()
    if empty is None:
        raise ConfigError(
            "the teacher is guided away from the empty caption, and the features hold none",
            key="posttrain.dmd.guidance_scale",
            way_out="Extract them with mm extract, or set it to 1.",
        )
    return {key: value.unsqueeze(0) for key, value in empty.items()}
