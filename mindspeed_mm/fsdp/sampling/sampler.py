"""Pictures and clips from a generator, through its own diffusers pipeline with whatever transformer is at hand.

The starting noise is ours and comes from the CPU: a sample does not depend on the batch that it is in, on the rank or
on the device. Which samples make a batch does not depend on the number of ranks either.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from mindspeed_mm.core.counts import by_count
from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation
from mindspeed_mm.fsdp.data.datasets.generation.pixels import MediaHeader, is_video, media_pixels, probe_media
from mindspeed_mm.fsdp.data.datasets.generation.row import GenerationRow
from mindspeed_mm.fsdp.loss.denoising import noise_of
from mindspeed_mm.fsdp.models.diffusion.adapter import LATENTS, DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.components import family_class, load_pipeline
from mindspeed_mm.fsdp.models.diffusion.few_steps import FewSteps
from mindspeed_mm.fsdp.models.diffusion.latents import as_pil
from mindspeed_mm.fsdp.models.diffusion.live_encoding import CaptionLengths
from mindspeed_mm.fsdp.models.diffusion.media_roles import TARGET, MediaRole, unfit
from mindspeed_mm.fsdp.models.diffusion.velocity import Denoiser
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.sampling.defaults import filled, key_or_flag
from mindspeed_mm.fsdp.sampling.few_steps import StudentDrawing, student_noise
from mindspeed_mm.fsdp.sampling.finite import FiniteSteps, NotFiniteError, not_finite
from mindspeed_mm.fsdp.sampling.prompts import Prompt
from mindspeed_mm.fsdp.utils.media_files import SoundTrack
from mindspeed_mm.fsdp.utils.quiet import quiet

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_POSITIONS_AND_TIMES = ("timestep", "guidance", "_ids", "sigma", "rotary")
"""Inputs of transformers whose names hold one of these keep their precision."""


@dataclass(frozen=True)
class SampleOrder:
    """One sample to make: its prompt, and which of that prompt's samples it is."""

    prompt: Prompt
    number: int
    """Number of the sample among those of its prompt, from 0."""

    def noise_seed(self, seed: int) -> int:
        """Seed of the starting noise, under the settings' seed. A row's own seed is that of the settings for the first
        prompt, so that one number is one picture in a row, on the command line and in a request to the server."""
        own = self.prompt.seed
        if own is not None:
            return derive_seed(own, 0, self.number) % 2**63
        return derive_seed(seed, self.prompt.number, self.number) % 2**63

    def file_stem(self, digits: int = 3) -> str:
        """Name of its file without the ending: prompt, sample, words of the prompt."""
        return f"{self.prompt.number:0{digits}}_{self.number:02}_{self.prompt.slug}"

    def describe(self, sampling: SamplingArguments) -> JsonObject:
        """What a manifest says of it: with the model and the other settings it can be made again."""
        prompt = self.prompt
        return {
            "number": prompt.number,
            "sample": self.number,
            "prompt": prompt.text,
            "negative_prompt": _with_negative(sampling, prompt.negative_prompt).negative_prompt,
            "image": None,
            **{name: str(path) for name, path in prompt.media.items()},
            "place": prompt.place,
            "seed": sampling.seed if prompt.seed is None else prompt.seed,
            "noise_seed": self.noise_seed(sampling.seed),
        }


@dataclass(frozen=True)
class MadeSample:
    """A picture, or a clip with its sound."""

    frames: np.ndarray
    """(T, H, W, 3) uint8; T is 1 for pictures."""
    sound: SoundTrack | None = None


SampleBatch = tuple[SampleOrder, ...]
"""Orders that go through the pipeline together: they share the negative prompt and the media, if any."""


def plan_batches(prompts: Sequence[Prompt], sampling: SamplingArguments) -> list[SampleBatch]:
    """All orders for some prompts in batches of at most `batch_size`; batches of one negative prompt stand together."""
    alike: dict[str | None, dict[tuple[Path | None, tuple[tuple[str, Path], ...]], list[SampleOrder]]] = {}
    """Negative prompt → media → orders."""
    for prompt in prompts:
        orders = alike.setdefault(prompt.negative_prompt, {}).setdefault((prompt.image, prompt.others), [])
        for number in range(sampling.num_samples):
            orders.append(SampleOrder(prompt, number))
    batches: list[SampleBatch] = []
    for by_media in alike.values():
        for orders in by_media.values():
            for first in range(0, len(orders), sampling.batch_size):
                batches.append(tuple(orders[first : first + sampling.batch_size]))
    return batches


def deal_in_step(batches: Sequence[SampleBatch], rank: int, world_size: int) -> Iterator[tuple[SampleBatch, bool]]:
    """A rank's batches where all ranks must call the transformer equally often: those of one round have the same
    negative prompt, and a rank that is left without one repeats another's.

    Yields:
        A batch, and whether its samples are this rank's to keep.
    """
    by_negative: dict[str | None, list[SampleBatch]] = {}
    for batch in batches:
        by_negative.setdefault(batch[0].prompt.negative_prompt, []).append(batch)
    for group in by_negative.values():
        for first in range(0, len(group), world_size):
            round_ = group[first : first + world_size]
            yield round_[min(rank, len(round_) - 1)], rank < len(round_)


class DiffusionSampler:
    """Makes samples.

    Args:
        adapter: The family.
        transformer: Loaded, on its device; may be sharded, then all ranks call together and equally often.
        encoders: From `components.load_encoders`, on the same device.
        compute_dtype: What a sharded transformer computes in when its parameters are kept in another type.
    """

    def __init__(
        self,
        adapter: DiffusionAdapter,
        transformer: nn.Module,
        encoders: DiffusionPipeline,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.adapter = adapter
        self._transformer, self._compute_dtype = transformer, compute_dtype
        self.pipeline = load_pipeline(adapter, transformer, encoders)
        """The family's pipeline around `transformer`."""

    def sample(self, prompts: Sequence[Prompt], sampling: SamplingArguments) -> Iterator[list[MadeSample]]:
        """The samples of all prompts, batch by batch in the order of `plan_batches`.

        Raises:
            DataError: The size is not one that the family takes, or a prompt's picture is off.
        """
        sampling = self.prepared(prompts, sampling)
        for batch in plan_batches(prompts, sampling):
            yield self.make(batch, sampling)

    def prepared(self, prompts: Sequence[Prompt], sampling: SamplingArguments, key: str = "") -> SamplingArguments:
        """The settings with what they leave out filled in, checked together with the prompts: what is off is said
        before anything runs.

        Args:
            prompts: What is to be sampled.
            sampling: What a request or a configuration says.
            key: Of the settings, for messages.

        Raises:
            DataError: The size is not one that the family takes; a picture is missing or too many; a video is short.
            ConfigError: The pipeline has no default size; a setting has no effect here.
        """
        check_request(self.adapter, prompts, sampling, key)
        sampling = filled(self.adapter, sampling, key)
        size = resolve_size(self.adapter, self.pipeline, sampling, key)
        for prompt in prompts:
            _check_lengths(prompt, self.adapter, size.frames)
        return sampling.model_copy(update={"height": size.height, "width": size.width, "num_frames": size.frames})

    def make(self, batch: Sequence[SampleOrder], sampling: SamplingArguments) -> list[MadeSample]:
        """The samples of one batch.

        Args:
            batch: From `plan_batches`.
            sampling: From `prepared`.

        Raises:
            DataError: The picture cannot be read.
            NotFiniteError: A prediction, the latents or what came out are not finite.
        """
        assert sampling.height and sampling.width and sampling.num_frames and sampling.num_inference_steps
        size = MediaSize(sampling.num_frames, sampling.height, sampling.width)
        if self.adapter.few_steps is not None:
            return self._drawn_in_few(self.adapter.few_steps, batch, sampling, size)
        arguments = self._arguments(batch, sampling, size)
        self.adapter.prepare_pipeline(self.pipeline, sampling)
        steps = FiniteSteps(len(batch), sampling.num_inference_steps)
        with (
            evaluating(self._transformer),
            nullcontext() if self._compute_dtype is None else computing_in(self._transformer, self._compute_dtype),
            quiet("diffusers", "transformers"),
            steps.watching(self._transformer, self.pipeline.vae),
        ):
            made = self.pipeline(**{**arguments, "output_type": "np", "return_dict": False})
        if (bad := steps.first_bad()) is not None:
            raise self._not_finite(bad[1], batch[bad[0]])
        frames = self._frames(np.asarray(made[0]), batch)
        if self.adapter.sound is None:
            return list(map(MadeSample, frames))
        return [MadeSample(*each) for each in zip(frames, self._sounds(made[1], batch), strict=True)]

    @torch.no_grad()
    def _drawn_in_few(
        self, few: FewSteps, batch: Sequence[SampleOrder], sampling: SamplingArguments, size: MediaSize
    ) -> list[MadeSample]:
        """By a student of few steps, along the path on which it was trained."""
        parameter = next(self._transformer.parameters())
        seeds = [order.noise_seed(sampling.seed) for order in batch]
        texts = self.adapter.encode_text(self.pipeline, [order.prompt.text for order in batch])
        inputs: dict[str, Any] = {
            **self.adapter.pad_text(texts),
            **student_noise(seeds, few, self.adapter.geometry.latent_shape(size)),
            **self._conditions(batch, size),
        }
        there = {key: value.to(parameter.device) for key, value in inputs.items()}
        scale = sampling.guidance_scale
        if scale is None or not self.adapter.takes_guidance:
            scale = few.guidance
        denoise = Denoiser(self.adapter, self._compute_dtype or parameter.dtype, scale)
        with evaluating(self._transformer):
            latents = StudentDrawing(denoise, few)(self._transformer, there)
        finite = latents.isfinite().flatten(1).all(dim=1).tolist()
        if not all(finite):
            raise self._not_finite("the latents behind the last step", batch[finite.index(False)])
        made: list[MadeSample] = []
        for row in latents:
            pixels = self.adapter.decode(self.pipeline, row.unsqueeze(0))[0]
            made.append(MadeSample(pixels.permute(1, 2, 3, 0).cpu().numpy()))  # (3, T, H, W) → (T, H, W, 3)
        return made

    def _conditions(self, batch: Sequence[SampleOrder], size: MediaSize) -> dict[str, torch.Tensor]:
        """What stands beside the latents, (B, …), of the media that prompts name, as in training."""
        found: dict[str, list[torch.Tensor]] = {}
        blank = torch.zeros(1, 3, size.frames, size.height, size.width, dtype=torch.uint8)
        for order in batch:
            media = {TARGET: blank}
            for role in self.adapter.media_roles:
                if role.prompt in order.prompt.media:
                    media[role.name] = load_pixels(order.prompt, role, size).unsqueeze(0)
            for key, value in self.adapter.encode_conditions(self.pipeline, media).items():
                found.setdefault(key, []).append(value)
        return {key: torch.cat(values) for key, values in found.items()}

    def _arguments(self, batch: Sequence[SampleOrder], sampling: SamplingArguments, size: MediaSize) -> dict[str, Any]:
        """What the pipeline is called with."""
        adapter, task, first = self.adapter, self.adapter.task, batch[0].prompt
        texts: list[str] = []
        noise_of_each: list[torch.Tensor] = []
        generators: list[torch.Generator] = []
        for order in batch:
            texts.append(order.prompt.text)
            noise_of_each.append(self.noise(order, sampling.seed, size))
            generators.append(_generator(order, sampling.seed, draws=task in adapter.draws))
        noise = torch.stack(noise_of_each)
        arguments = adapter.pipeline_arguments(_with_negative(sampling, first.negative_prompt), texts, noise)
        arguments["generator"] = generators
        roles = adapter.roles.get(task)
        if roles:
            media = {role.name: load_media(first, role, size) for role in roles if role.prompt in first.media}
            arguments |= adapter.pipeline_media(media, sampling)
        arguments |= adapter.starting_noise(self.pipeline, self._further_noise(batch, sampling) | {LATENTS: noise})
        arguments["prompt"] = texts
        if task in adapter.one_by_one:  # some of these pipelines take no lists
            for name in arguments.keys() & {"prompt", "negative_prompt", "generator"}:
                arguments[name] = arguments[name][0]
        return arguments

    def cut_short(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts that are longer than what the transformer reads of them."""
        lengths = CaptionLengths(self.adapter, self.pipeline.components)
        return [prompts[number] for number in lengths.cut([prompt.text for prompt in prompts])]

    def noise(self, order: SampleOrder, seed: int, size: MediaSize) -> torch.Tensor:
        """Starting noise of a sample: fp32, (C, H, W) or (C, T, H, W)."""
        generator = torch.Generator().manual_seed(order.noise_seed(seed))
        return torch.randn(self.adapter.geometry.latent_shape(size), generator=generator)

    def _further_noise(self, batch: Sequence[SampleOrder], sampling: SamplingArguments) -> dict[str, torch.Tensor]:
        """Starting noise of `further_latents` by batch key, (B, …) fp32."""
        assert sampling.num_frames and sampling.fps
        found: dict[str, torch.Tensor] = {}
        for key, shape in self.adapter.further_shapes(sampling.num_frames, sampling.fps).items():
            noise = []
            for order in batch:
                seed = derive_seed(order.noise_seed(sampling.seed), key)
                noise.append(noise_of(seed, shape))
            found[key] = torch.stack(noise)
        return found

    def _sounds(self, waves: torch.Tensor, batch: Sequence[SampleOrder]) -> list[SoundTrack]:
        """Of each sample. Raises `NotFiniteError`."""
        waves_BCN = waves.float().cpu().numpy()
        self._check_finite(waves_BCN, batch)
        rate = int(self.pipeline.vocoder.config.output_sampling_rate)
        return [SoundTrack(wave, rate) for wave in waves_BCN]

    def _frames(self, media: np.ndarray, batch: Sequence[SampleOrder]) -> list[np.ndarray]:
        """(B, H, W, 3) or (B, T, H, W, 3) in 0..1 → rounded bytes of each, with a time axis."""
        self._check_finite(media, batch)
        if media.ndim == 4:
            media = media[:, None]
        return list((media * 255).round().astype(np.uint8))

    def _check_finite(self, media: np.ndarray, batch: Sequence[SampleOrder]) -> None:
        finite = np.isfinite(media.reshape(len(media), -1)).all(axis=1)
        if not finite.all():
            raise self._not_finite("the decoded samples", batch[int(np.argmin(finite))])

    def _not_finite(self, what: str, order: SampleOrder) -> NotFiniteError:
        models = {"transformer.": self._transformer}
        for name, part in self.pipeline.components.items():
            if isinstance(part, nn.Module) and part is not self._transformer:
                models[f"{name}."] = part
        return not_finite(what, models, where=order.prompt.place)


def resolve_size(
    adapter: DiffusionAdapter, pipeline: DiffusionPipeline, sampling: SamplingArguments, key: str = ""
) -> MediaSize:
    """The size that is sampled: sides that the settings leave open are the release's or the pipeline's own.

    Raises:
        DataError: The family takes no such size; the nearest one is named.
        ConfigError: The settings leave it open, and so does the pipeline.
    """
    height, width = adapter.default_size(pipeline)
    size = MediaSize(sampling.num_frames or 1, sampling.height or height or 0, sampling.width or width or 0)
    if not (size.height and size.width):
        raise ConfigError(
            f"{type(pipeline).__name__} has no default size",
            key=key,
            way_out=f"Set height and width, multiples of {adapter.geometry.side_step}.",
        )
    adapter.geometry.check(size, key=key)
    return size


def check_request(
    adapter: DiffusionAdapter, prompts: Sequence[Prompt], sampling: SamplingArguments, key: str = ""
) -> None:
    """Raise what can be said of prompts and settings without any weights.

    Raises:
        DataError: A prompt lacks a file that the task is about, or has one of another task.
        ConfigError: The size is not one that the family takes; a setting has no effect here.
    """
    geometry = adapter.geometry
    family_class(adapter, adapter.pipelines[adapter.task])  # said now where it is not installed
    sampling = filled(adapter, sampling, key)
    smallest = geometry.nearest(MediaSize(1, 1, 1))
    frames = sampling.num_frames or 1
    geometry.check_frames(frames, key=key_or_flag(key, "num_frames", "--frames"))
    asked = MediaSize(frames, sampling.height or smallest.height, sampling.width or smallest.width)
    geometry.check(asked, key=key)
    if (few := adapter.few_steps) is not None and few.num_frame_per_block is not None:
        few.blocks(geometry.latent_shape(asked)[1])
    for prompt in prompts:
        _check_media(prompt, adapter)
    if adapter.task in adapter.one_by_one and sampling.batch_size > 1:
        raise ConfigError(
            f"{sampling.batch_size}, but samples of '{adapter.task}' are made one at a time",
            key=key_or_flag(key, "batch_size", "--batch-size"),
            way_out="Set 1.",
        )
    some_latents = torch.zeros(1, *geometry.latent_shape(smallest))
    for negative in {prompt.negative_prompt for prompt in prompts}:
        settings = _with_negative(sampling, negative)
        _check_guidance(adapter, settings)
        _check_few_steps(adapter, settings, key)
        adapter.pipeline_arguments(settings, [""], some_latents)


def _check_guidance(adapter: DiffusionAdapter, sampling: SamplingArguments) -> None:
    scale = sampling.guidance_scale
    if scale is not None and scale <= adapter.guidance_off and not adapter.takes_guidance:
        reason = f"guidance is off at a scale of {scale:g}"
        if adapter.usage.guidance == scale and adapter.usage.release:
            reason += f", with which {adapter.usage.release} was released"
        adapter.refuse_negative_prompt(sampling, reason)


def _check_few_steps(adapter: DiffusionAdapter, sampling: SamplingArguments, key: str) -> None:
    """A student draws in the steps that it was distilled to, its guidance in its weights."""
    few = adapter.few_steps
    if few is None:
        return
    steps, scale = len(few.denoising_step_list), sampling.guidance_scale
    if sampling.num_inference_steps != steps:
        raise ConfigError(
            f"{sampling.num_inference_steps}, but the model was distilled to {steps} steps",
            key=key_or_flag(key, "num_inference_steps", "--steps"),
            way_out="Leave it out.",
        )
    if scale is not None and scale > adapter.guidance_off and not adapter.takes_guidance:
        raise ConfigError(
            f"{scale:g}, but the model was distilled from a guided one and draws without guidance",
            key=key_or_flag(key, "guidance_scale", "--guidance-scale"),
            way_out="Leave it out.",
        )


def _check_media(prompt: Prompt, adapter: DiffusionAdapter) -> None:
    roles, given = adapter.roles.get(adapter.task, ()), prompt.media
    pipeline = adapter.pipelines[adapter.task]
    needed = [role.prompt for role in roles if not role.is_optional]
    for name in needed:
        if name in given:
            continue
        options = " and --".join(needed).replace("_", "-")
        raise DataError(
            f"the prompt has no {_in_words(name)}, and {pipeline} goes on from one",
            where=prompt.place,
            key=name,
            way_out=f"Give a file of JSON rows with 'prompt' and {' and '.join(map(repr, needed))}, or --{options}.",
        )
    there = [role.name for role in roles if role.prompt in given]
    if found := unfit(roles, there):
        role, other = found
        what = f"the prompt has neither a {role.prompt} nor a {other}, and {pipeline} goes on from one of them"
        if role.name in there:
            what = f"the prompt has a {role.prompt} and no {other} that it would be of"
        way_out = f"Name a file as '{other}' in a row of JSON, or give --{other}."
        raise DataError(what, where=prompt.place, key=role.prompt, way_out=way_out)
    taken = {role.prompt for role in roles}
    for name in given:
        if name not in taken:
            what = f"{pipeline} takes no {_in_words(name)}"
            raise DataError(what, where=prompt.place, key=name, way_out="Leave it out.")


def _in_words(field: str) -> str:
    """What to call a field of a prompt."""
    return field.replace("_", " ").replace("image", "picture")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; afterwards each module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def computing_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Pipelines look at the parameters for the type to compute in. A sharded model's are fp32 or, while they are
    gathered, of another type; so its inputs are cast here, times and positions excepted. Outputs are fp32 at least:
    steps of the scheduler are not to be rounded."""

    names = list(inspect.signature(model.forward).parameters)

    def cast(
        _module: nn.Module, args: tuple[object, ...], inputs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        by_position = tuple(_cast(name, value, dtype) for name, value in zip(names, args, strict=False))
        return by_position, {name: _cast(name, value, dtype) for name, value in inputs.items()}

    def cast_back(_module: nn.Module, _args: object, output: tuple[object, ...]) -> tuple[object, ...]:
        exact = torch.promote_types(dtype, torch.float32)
        return tuple(_as_type(item, exact) for item in output)

    # In front of the hooks that gather parameters, so that theirs see what the model will see.
    handles = (
        model.register_forward_pre_hook(cast, with_kwargs=True, prepend=True),
        model.register_forward_hook(cast_back),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _cast(name: str, value: object, dtype: torch.dtype) -> object:
    if name == "t" or any(part in name for part in _POSITIONS_AND_TIMES):
        return value
    return _as_type(value, dtype)


def _as_type(value: object, dtype: torch.dtype) -> object:
    """Floating tensors in a type, those in a list too."""
    if isinstance(value, list):
        return [_as_type(item, dtype) for item in value]
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


def _generator(order: SampleOrder, seed: int, *, draws: bool) -> torch.Generator:
    """What draws a sample's own numbers: the noise that schedulers and decoders add; or, where the pipeline `draws`,
    whatever it draws."""
    own = order.noise_seed(seed)
    if not draws:  # not the generator of the starting noise: its numbers would come again
        own = derive_seed(own, "steps") % 2**63
    return torch.Generator().manual_seed(own)


def _with_negative(sampling: SamplingArguments, negative: str | None) -> SamplingArguments:
    return sampling if negative is None else sampling.model_copy(update={"negative_prompt": negative})


def probe_prompt(prompt: Prompt) -> None:
    """Look into the files that a prompt names. Raises `DataError` as `load_media`; a cut video may go unnoticed."""
    for name, path in prompt.media.items():
        with _placed(prompt, name):
            probe_file(path)


def _check_lengths(prompt: Prompt, adapter: DiffusionAdapter, frames: int) -> None:
    """Said before the first sample is made, not when it is this prompt's turn."""
    for role in adapter.roles.get(adapter.task, ()):
        path = prompt.media.get(role.prompt)
        if path is None or role.frames != "all":
            continue
        with _placed(prompt, role.prompt):
            found = probe_media(_row_of(path), MediaLoader(path.parent))
        is_repeated = found.fps == 0 and role.repeats_still
        if found.frames < frames and not is_repeated:
            raise DataError(
                f"'{path.name}' has {found.frames} {by_count(found.frames, 'frame', 'frames')}, fewer than the "
                f"{frames} that are sampled",
                where=prompt.place,
                key=role.prompt,
                way_out="Name a longer video, or sample fewer frames.",
            )


@contextmanager
def _placed(prompt: Prompt, name: str) -> Iterator[None]:
    """What is wrong with a file, told of the prompt that names it in a field."""
    try:
        yield
    except DataError as error:
        problem = error.problems[0]
        raise DataError(problem.what, where=prompt.place, key=name, way_out=problem.way_out) from error


def probe_file(path: Path) -> MediaHeader:
    """Look into a file: a still picture is decoded, of what moves the header is read, since nobody knows here which of
    its frames are wanted.

    Raises:
        DataError: It is missing, refused or broken; a cut video may go unnoticed.
    """
    row, media = _row_of(path), MediaLoader(path.parent)
    header = probe_media(row, media)
    if header.frames == 1 and not is_video(row):
        media.load_image(path.name)
    return header


def _row_of(path: Path) -> GenerationRow:
    """The row that names a file alone."""
    return GenerationRow(RowLocation(path.name, 0), path.name, ())


PipelineMedium = Image.Image | list[Image.Image]
"""A picture, or those of a video."""


def load_media(prompt: Prompt, role: MediaRole, size: MediaSize) -> PipelineMedium:
    """The file that a prompt names for a role, scaled and cut as training data are: a picture, or the list of those of
    a video. Raises as `load_pixels`."""
    pictures = as_pil(load_pixels(prompt, role, size).transpose(0, 1))
    return pictures if role.frames == "all" else pictures[0]


def load_pixels(prompt: Prompt, role: MediaRole, size: MediaSize) -> torch.Tensor:
    """The same as (3, T, H, W) uint8.

    Raises:
        DataError: It is missing, refused, broken or too short.
    """
    path = prompt.media[role.prompt]
    if role.frames != "all":
        size = MediaSize(1, size.height, size.width)
    with _placed(prompt, role.prompt):
        medium = _row_of(path), size, MediaLoader(path.parent)
        return media_pixels(*medium, is_whole=role.is_whole, repeats_still=role.repeats_still)
