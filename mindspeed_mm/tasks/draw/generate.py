"""`mm infer` of a generator: prompts → a folder of pictures or clips with a manifest, continued where it stopped.

Ranks share the batches out among themselves. Which samples make a batch does not depend on their number, nor on what is
there already, so the files do not either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from torch import nn

from mindspeed_mm.core.artifacts import RunFolder, one_at_a_time
from mindspeed_mm.core.errors import ConfigError, DataError, StoppedAfterSave, UsageError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.fsdp.distributed.job.launch import joined_ranks
from mindspeed_mm.fsdp.distributed.parallel_state import ParallelState
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.components import load_encoders
from mindspeed_mm.fsdp.models.diffusion.few_steps import FewSteps
from mindspeed_mm.fsdp.models.diffusion.find import adapter_of_section, find_adapter
from mindspeed_mm.fsdp.models.diffusion.transformer import ExpertPair
from mindspeed_mm.fsdp.ops.context_attention.share import CONTEXT_KEY
from mindspeed_mm.fsdp.params.argument import Arguments, InferenceArguments, TrainingArguments
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.sampling.defaults import as_trained, filled
from mindspeed_mm.fsdp.sampling.prompts import Prompt, empty_note, prompts_of, read_prompts
from mindspeed_mm.fsdp.sampling.sampler import (
    DiffusionSampler,
    SampleBatch,
    SampleOrder,
    check_request,
    deal_in_step,
    plan_batches,
    probe_file,
)
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.run.launched import LaunchFolder
from mindspeed_mm.fsdp.train.run.stop_signal import StopSignal
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype
from mindspeed_mm.fsdp.utils.ranks import Ranks
from mindspeed_mm.fsdp.utils.work_progress import WorkProgress
from mindspeed_mm.tasks.draw.loading import load_sampler
from mindspeed_mm.tasks.draw.sample_folder import Key, SampleFolder
from mindspeed_mm.tasks.model_source import ModelSource, resolve_model, with_adapters

_WAIT_S = 7 * 24 * 3600.0
"""Ranks wait for one another at the end, and one may have much more to do."""
_MOST_SHOWN = 3


@dataclass(frozen=True)
class GenerateRequest:
    """What is asked of a generator."""

    prompts: tuple[str, ...] = ()
    prompts_file: Path | None = None
    media: Mapping[str, Path] = field(default_factory=dict)
    """Go with `prompts`: files by the fields of a prompt, as `image`, the picture that a video goes on from."""
    task: str | None = None
    """What to do where the folder allows more than one; None: as the configuration says."""
    media_dir: Path | None = None
    """Where images of `prompts_file` start; by default its folder."""
    settings: JsonMapping = field(default_factory=dict)
    """Fields of `SamplingArguments`; what is not given is the run's `inference.sampling`, else its `training.sampling`,
    else what `sampling/defaults.py` fills in."""
    lora: Path | None = None
    """Folder of adapters for the model."""
    transformer: Path | None = None
    """Folder with weights of the transformer, in any layout, instead of those of the model's folder."""
    vae_options: tuple[str, ...] = ()
    """What the VAE does to take less memory, `tiling` or `slicing`, beside what the configuration says."""
    config: Path | None = None
    """A YAML that stands for the run's: its plugins are imported, its `model` and sampling sections apply."""
    plan: Path | None = None
    """A YAML whose section `parallel` spreads the transformer over the ranks."""


@dataclass(frozen=True)
class GenerateOutcome:
    """What became of the prompts."""

    out: Path
    made: int
    kept: int
    """Samples that the folder held already."""
    notes: tuple[str, ...] = ()

    def sentence(self) -> str:
        """Return a sentence about the folder, how many samples were made and how many were already there."""
        samples = "sample" if self.made == 1 else "samples"
        told = f"{self.out}: {self.made} {samples} made"
        if self.kept:
            told += f", {self.kept} were already there"
        return told


def run(model: Path, out: Path, request: GenerateRequest, *, overwrite: bool = False) -> GenerateOutcome | None:
    """Make the samples that `out` lacks, as one rank of a job if this process is one.

    Args:
        model: A folder in diffusers' layout, a generator's run, or one checkpoint of it.
        out: Folder of the samples and of `manifest.jsonl`.
        request: What to make.
        overwrite: Remove the samples that `out` holds.

    Returns:
        How it went; None on ranks above 0.

    Raises:
        StoppedAfterSave: A signal asked for an end; run again to go on.
        MMError: Anything else that a person can act on. Nothing was made when the request is off.
    """
    # Before ranks form a group: reading a checkpoint would be a step that they take together.
    source = resolve_source(model, request.lora)
    if request.transformer is not None:
        source = replace(source, transformer=request.transformer)
    arguments = _arguments_of(source, request.config)
    asked, prompts = resolve_request(request, arguments)
    sampling = asked if arguments is None else as_trained(arguments.data, asked)
    notes = [_size_note(asked, sampling), empty_note(prompts)]
    adapter = _adapter_of(source, arguments, request.task)
    adapter.vae_options = tuple(dict.fromkeys((*adapter.vae_options, *request.vae_options)))
    sampling = filled(adapter, sampling, "--size")
    check_request(adapter, prompts, sampling, "--size")
    batches = plan_batches(prompts, sampling)
    folder = SampleFolder(out, source.fingerprint(), sampling)
    with joined_ranks(_WAIT_S) as ranks, StopSignal(LaunchFolder.of_this_rank()) as stop:
        if request.plan is not None:
            from mindspeed_mm.tasks.spread_model import check_spread  # all of training's plans: half a second

            check_spread(source, ranks.world_size, "mm export --merge")
        orders = list(chain.from_iterable(batches))
        done = ranks.first("reading the folder", lambda: folder.begin(orders, overwrite=overwrite))
        lacking = [batch for batch in batches if missing_of(batch, done)]
        is_needed = ranks.rank < len(lacking) if request.plan is None else bool(lacking)
        if is_needed:
            section = arguments.model if arguments is not None else None
            generator = load_on_ranks(adapter, source, section, request.plan, ranks)
            notes.append(_cut_note(generator.sampler.cut_short(prompts)))
            prepared = generator.sampler.prepared(prompts, sampling, "--size")
            _Work(generator, prepared, folder, done).make(lacking, list(filter(None, notes)), stop)
        ranks.gather(None)  # all have written what they had to
        if not ranks.is_first:
            return None
        folder.finish()
    return GenerateOutcome(out, len(orders) - len(done), len(done), tuple(filter(None, notes)))


@dataclass(frozen=True)
class _Work:
    """Makes one rank's share of the samples and writes those that are missing to the folder."""

    generator: RankSampler
    sampling: SamplingArguments
    folder: SampleFolder
    done: set[Key]

    def make(self, batches: Sequence[SampleBatch], notes: Sequence[str], stop: StopSignal) -> None:
        """Make this rank's share of what is missing. Batches are made whole, so that what comes out does not depend on
        what is there; what is there is not written again."""
        ranks, share = self.generator.ranks, list(self.generator.deal(batches))
        progress = WorkProgress(rank=ranks.rank, world_size=ranks.world_size)
        for note in notes:
            progress.note(note)
        progress.begin(sum(len(missing_of(batch, self.done)) for batch, is_kept in share if is_kept))
        for batch, is_kept in share:
            if self.generator.agrees(stop.requested):
                progress.end()
                raise StoppedAfterSave(
                    "stopped; what was made is kept",
                    where=str(self.folder.path),
                    way_out="Run the same command again to continue.",
                )
            made = self.generator.sampler.make(batch, self.sampling)
            if is_kept:
                missing = missing_of(batch, self.done)
                for order, sample in zip(batch, made, strict=True):
                    if order in missing:
                        self.folder.write(order, sample, ranks.rank)
                progress.advance(len(missing))
        progress.end()


def load_generator(
    model: Path, *, lora: Path | None = None, config: Path | None = None
) -> tuple[DiffusionSampler, SamplingArguments]:
    """A generator ready to sample, and the settings of its run.

    Args:
        model: A folder in diffusers' layout, a generator's run, or one checkpoint of it.
        lora: Folder of adapters for the model.
        config: A YAML that stands for the run's.

    Raises:
        MMError: The model is none.
    """
    source = resolve_source(model, lora)
    arguments = _arguments_of(source, config)
    sampler = load_sampler(_adapter_of(source, arguments, None), source, current_device())
    return sampler, SamplingArguments() if arguments is None else as_trained(
        arguments.data, _configured(arguments.training, arguments.inference)
    )


def resolve_source(model: Path, lora: Path | None) -> ModelSource:
    """The model folder and what was trained of it; a checkpoint is exported when it is not yet.

    Raises:
        UsageError: Adapters are named for a run that has its own.
        MMError: The model is none.
    """
    with one_at_a_time(model) if model.is_dir() else nullcontext():  # other ranks want the same export
        source = resolve_model(model)
    return with_adapters(source, lora)


def resolve_request(request: GenerateRequest, arguments: Arguments | None) -> tuple[SamplingArguments, list[Prompt]]:
    """Settings and prompts.

    Args:
        request: From the command line.
        arguments: Of the run, if the model is one.

    Raises:
        UsageError: There are no prompts.
        DataError: The file of prompts, or the picture, is off.
    """
    sampling = _configured(arguments.training, arguments.inference) if arguments is not None else SamplingArguments()
    sampling = sampling.model_copy(update=dict(request.settings))
    if request.prompts or request.prompts_file is not None:
        return sampling, _requested_prompts(request)
    prompts = prompts_of(sampling)
    if not prompts:
        raise UsageError("there are no prompts", way_out="Give --prompt TEXT or --prompts FILE.")
    return sampling, prompts


def missing_of(batch: SampleBatch, done: set[Key]) -> list[SampleOrder]:
    """What is not there of a batch."""
    return [order for order in batch if (order.prompt.number, order.number) not in done]


def _requested_prompts(request: GenerateRequest) -> list[Prompt]:
    files = {name: _checked(name, path) for name, path in request.media.items()}
    image, others = files.pop("image", None), tuple(files.items())
    prompts = [Prompt(number, text, "--prompt", image, others=others) for number, text in enumerate(request.prompts)]
    if request.prompts_file is not None:
        prompts += read_prompts(request.prompts_file, media_dir=request.media_dir, first_number=len(prompts))
    return prompts


def _checked(name: str, file: Path) -> Path:
    """A picture or a video that can be opened: said now, not after the weights are loaded."""
    path, option = file.resolve(), f"--{name.replace('_', '-')}"
    try:
        probe_file(path)
    except DataError as error:
        raise DataError(error.problems[0].what, key=option, way_out="Give another file.") from error
    return path


def _configured(training: TrainingArguments, inference: InferenceArguments) -> SamplingArguments:
    """`training.sampling`, and over it what `inference.sampling` says."""
    defaults = SamplingArguments()
    said = {name: value for name, value in inference.sampling.items() if value != defaults[name]}
    return training.sampling.model_copy(update=said)


def _arguments_of(source: ModelSource, config: Path | None) -> Arguments | None:
    if config is not None:
        return load_with_plugins(config).arguments
    if source.run is None or not RunFolder(source.run).resolved.exists():
        return None
    return load_with_plugins(RunFolder(source.run).resolved).arguments


def _adapter_of(source: ModelSource, arguments: Arguments | None, task: str | None) -> DiffusionAdapter:
    if arguments is None:
        return find_adapter(source.folder, task=task)
    section = arguments.model.model_copy(update={"model_name_or_path": str(source.folder)})
    adapter = adapter_of_section(section, task)
    adapter.note_few_steps(FewSteps.of_run(arguments.training, arguments.posttrain))
    return adapter


def _size_note(asked: SamplingArguments, sampling: SamplingArguments) -> str:
    """What to say of a size that the run was trained on; nothing where the request or a sampling section names one."""
    said = []
    if (asked.height, asked.width) != (sampling.height, sampling.width):
        said.append(f"--size {sampling.height}x{sampling.width}")
    if asked.num_frames != sampling.num_frames:
        said.append(f"--frames {sampling.num_frames}")
    if said:
        return f"not given, and taken as the run was trained: {' '.join(said)}"
    return ""


def _cut_note(prompts: Sequence[Prompt]) -> str:
    """What to say of prompts that are not read to their end; nothing where there are none."""
    if not prompts:
        return ""
    places = ", ".join(prompt.place for prompt in prompts[:_MOST_SHOWN])
    if len(prompts) > _MOST_SHOWN:
        places += " …"
    count = "1 prompt is" if len(prompts) == 1 else f"{len(prompts)} prompts are"
    return f"{count} longer than what the text encoder reads ({places}): the end is cut off"


# --- over ranks -------------------------------------------------------------------------------------------------------
# A generator that is spread over the ranks of a job to draw, by the plan of a YAML: its weights, and the tokens of a
# sample where that plan is context parallel.


@dataclass(frozen=True)
class RankSampler:
    """A generator on this rank, and which samples the rank makes with it."""

    sampler: DiffusionSampler
    ranks: Ranks
    state: ParallelState | None = None
    """How the model is spread; None: each rank holds all of it."""

    def deal(self, batches: Sequence[SampleBatch]) -> Iterator[tuple[SampleBatch, bool]]:
        """This rank's batches, and whether their samples are its own to write: ranks that share a model make calls that
        others need."""
        if self.state is None:
            return ((batch, True) for batch in batches[self.ranks.rank :: self.ranks.world_size])
        is_first = self.state.is_first_of_its_samples
        dealt = deal_in_step(batches, self.state.data_rank, self.state.data_size)
        return ((batch, is_kept and is_first) for batch, is_kept in dealt)

    def agrees(self, wish: bool) -> bool:
        """Whether this rank, or one that shares a model with others, wishes something."""
        if self.state is None:
            return wish
        return any(self.ranks.gather(wish))


def load_on_ranks(
    adapter: DiffusionAdapter, source: ModelSource, model: ModelArguments | None, plan: Path | None, ranks: Ranks
) -> RankSampler:
    """The whole generator on each rank or, by the plan of a YAML, this rank's part of it.

    Args:
        adapter: Of `source.folder`.
        source: The folder, and what was trained of it.
        model: The section of the run, if the model is one.
        plan: The YAML whose section `parallel` says how the transformer is spread, and in which type it computes.
        ranks: Of the job.

    Raises:
        ConfigError: The plan does not fit the model or the number of ranks; it spreads samples of two transformers.
        ModelFolderError: As `load_sampler`.
    """
    if plan is None:
        return RankSampler(load_sampler(adapter, source, current_device()), ranks)
    from mindspeed_mm.tasks.spread_model import load_part, read_plan  # all of training's plans: half a second

    sections = {} if model is None else {"model": model}
    arguments = read_plan(plan, source.folder, {}, features=FeatureArguments(), **sections)
    arguments = arguments.model_copy(update={"model": arguments.model.model_copy(update={"task": adapter.task})})
    part = load_part(arguments, source.transformer)
    if part.state.sizes.cp > 1:
        _spread_samples(part.model, plan)
    compute_dtype = torch_dtype(arguments.parallel.fsdp_plan.param_dtype)
    sampler = DiffusionSampler(adapter, part.model, load_encoders(adapter, current_device()), compute_dtype)
    return RankSampler(sampler, ranks, part.state)


def _spread_samples(model: nn.Module, plan: Path) -> None:
    """Ask for it in each call, as a batch of training does; a pipeline does not know of it."""
    if isinstance(model, ExpertPair):
        raise ConfigError(
            "samples of two transformers are not spread over ranks",
            where=str(plan),
            key="parallel.ring_attention_size · parallel.ulysses_parallel_size",
            way_out="Set both sizes to 1, and spread the weights: fully_shard_parallel_size.",
        )
    model.register_forward_pre_hook(_ask, with_kwargs=True, prepend=True)


def _ask(_: nn.Module, args: tuple[object, ...], inputs: Mapping[str, object]) -> tuple[object, JsonObject]:
    return args, {**inputs, CONTEXT_KEY: True}
