"""What must be known of a family of denoising transformers to extract for it, train it and sample from it.

diffusers has the models and the pipelines. A family is one subclass of `DiffusionAdapter`, registered with
`@model_register.register("<id>")` in `models/<id>/modeling_<id>.py`, and a `card.yaml` beside it; nothing else in the
package names it.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError, DataError, ModelFolderError, Problem
from mindspeed_mm.core.media_geometry import MediaGeometry, SoundGeometry
from mindspeed_mm.fsdp.models.diffusion.generator_folder import GeneratorFolder
from mindspeed_mm.fsdp.models.diffusion.latent_scales import unscaled
from mindspeed_mm.fsdp.models.diffusion.media_roles import MediaRole
from mindspeed_mm.fsdp.models.diffusion.noise_paths import FlowPath, NoisePath
from mindspeed_mm.fsdp.models.diffusion.pixels import as_bytes
from mindspeed_mm.fsdp.models.diffusion.usage import ReleaseUse, usage_of
from mindspeed_mm.fsdp.models.structure.cut_points import CutPoints
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import SamplePlan
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.utils.model_parts import attribute_at

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin

LATENTS = "latents"
"""Batch key of a sample's latents: of what `encode_media` makes."""
TextFeatures = dict[str, torch.Tensor]
"""One caption's features by batch key, without the batch axis: `prompt_embeds` (L, D), `pooled_prompt_embeds` (D,)."""
ConditionShapes = dict[str, tuple[int, ...]]
"""Batch key of a condition → its shape, without the batch axis."""
TransformerOutput = tuple[Any, ...]
"""What forward of a transformer of diffusers returns with `return_dict=False`: tensors, or lists of them."""


@dataclass(frozen=True)
class Requirement:
    """A setting of the transformer that another component of the folder fixes."""

    setting: str
    value: object
    """None: nothing is asked."""
    source: str
    """Where the value comes from, for messages: a component, alone or before a colon."""


class DiffusionAdapter(GeneratorFolder, ABC):
    """One family, seen through one model folder in diffusers' layout. Making one reads JSON files only.

    Args:
        folder: With `model_index.json`, `transformer/`, `vae/`, text encoders, tokenizers and `scheduler/`.
        transformer: Settings of the transformer's configuration to change (`model.transformer` of the YAML).
        task: What is trained or sampled (`model.task`); None: the first that the folder's pipeline does.
    """

    transformer_class: ClassVar[str]
    """Name of the transformer's class in diffusers."""
    pipelines: ClassVar[Mapping[str, str]]
    """Task (t2i, t2v, i2v …) → diffusers' pipeline class that samples it. `model_index.json` names one; its first task
    is what the folder does unless the configuration names another."""
    more_tasks: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Pipeline class of `model_index.json` → tasks that its weights do too, by other pipelines."""
    roles: ClassVar[Mapping[str, tuple[MediaRole, ...]]] = {}
    """Task → media that its samples have beside the one that is learned, in the order of the pipeline's arguments."""
    text_reads_media: ClassVar[frozenset[str]] = frozenset()
    """Tasks whose text encoder reads the media of the roles together with the caption: `encode_text_beside`."""
    draws: ClassVar[frozenset[str]] = frozenset()
    """Tasks whose pipeline draws numbers of its own: it gets a generator that depends on the sample alone."""
    one_by_one: ClassVar[frozenset[str]] = frozenset()
    """Tasks whose pipeline makes one sample at a time."""
    blocks: ClassVar[tuple[str, ...]]
    """Patterns of the transformer's repeated blocks in execution order: what is sharded and recomputed one by one."""
    sample_plan: ClassVar[SamplePlan | None] = None
    """Where forward is cut when a sample is spread over ranks; None: it cannot be."""
    whole_because: ClassVar[str] = ""
    """Why it cannot be."""
    never_split: ClassVar[tuple[str, ...]] = ()
    """Patterns of layers that tensor parallelism keeps whole: what follows them takes the heads of all ranks."""
    cut_points: ClassVar[CutPoints | None] = None
    """Where the transformer is cut into stages; None: it cannot be."""
    uncut_because: ClassVar[str] = ""
    """Why it cannot be."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Module patterns that LoRA adapts when the YAML names none: those of diffusers' training script for the family
    (examples/dreambooth/train_dreambooth_lora_*.py, examples/cogvideo at 58eb52c0), where it has one."""
    more_lora_targets: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Task → what the script for it adapts in addition."""
    older_lora_targets: ClassVar[tuple[str, ...]] = ()
    """What runs of older versions adapted instead, where that was something else: they are resumed with it."""
    streams: ClassVar[Mapping[str, str]] = {}
    """Module pattern → what its layers go over, for counting FLOPs: `latents` (what no pattern names), `caption`,
    `picture`, `samples` (one row each), or two of them joined by `+`. The first that fits counts. Empty: nobody knows,
    and the log has no MFU."""
    memory_streams: ClassVar[tuple[str, ...]] = ()
    """Arguments that blocks read and never change."""
    tokenizer: ClassVar[str]
    """The tokenizer whose tokens the transformer reads one by one."""
    encoders: ClassVar[tuple[str, ...]] = ("vae",)
    """Components without which nothing can be encoded; others of the pipeline may be null in `model_index.json`."""
    reads_fps: ClassVar[bool] = False
    """Whether `inputs` reads how fast a clip is: `fps` of the batch."""
    latents_in_sequence: ClassVar[tuple[str, ...]] = ()
    """Conditions whose latents stand in the transformer's sequence before or behind those of the noise."""
    latents_are_one: ClassVar[bool] = False
    """Whether the loss of `latents` and `further_latents` is one mean over all of them, not a sum of means."""
    most_text_tokens: ClassVar[int] = 512
    """`max_sequence_length` of the pipelines."""
    uses: ClassVar[tuple[ReleaseUse, ...]] = ()
    """How releases are used, where that is not the pipeline's default: read through `usage`."""
    frames_argument: ClassVar[str] = "num_frames"
    """What the pipelines call the number of frames."""
    true_guidance: ClassVar[str] = "guidance_scale"
    """What the pipelines call the scale of classifier-free guidance."""
    guidance_off: ClassVar[float] = 1.0
    """The largest scale of classifier-free guidance that switches it off."""

    def __init__(self, folder: Path, transformer: Mapping[str, Any] | None = None, task: str | None = None) -> None:
        super().__init__(folder, transformer)
        self._asked_task = task
        self.vae_options: tuple[str, ...] = ()
        """What the VAE does to take less memory: `tiling`, `slicing`."""
        self.quantize_encoders: str | None = None
        """How the text and picture encoders keep their linear layers: `nf4`, `int8`; None: as stored."""

    @classmethod
    def of_release(cls, index: Mapping[str, Any]) -> type[DiffusionAdapter]:
        """The class for a folder: another one where releases of a family differ in what a sample is made of.

        Args:
            index: The folder's `model_index.json`.
        """
        return cls

    @cached_property
    def task(self) -> str:
        """What is done with the folder: t2i, t2v, i2v …

        Raises:
            ModelFolderError: The pipeline is none of this family's.
            ConfigError: The folder is not for the task that the configuration names.
        """
        name = self.index.get("_class_name")
        tasks = [task for task, pipeline in self.pipelines.items() if pipeline == name]
        tasks += self.more_tasks.get(str(name), ())
        if not tasks:
            raise ModelFolderError(
                f"{name} is not a pipeline of {self.transformer_class}",
                where=str(self.folder / "model_index.json"),
                key="_class_name",
                way_out=f"It takes {', '.join(dict.fromkeys(self.pipelines.values()))}.",
            )
        if self._asked_task not in (None, *tasks):
            raise ConfigError(
                f"'{self._asked_task}' is not what {name} is for",
                where=str(self.folder / "model_index.json"),
                key="model.task",
                way_out=f"Set {' or '.join(tasks)}, or name the folder of a model for {self._asked_task}.",
            )
        return self._asked_task or tasks[0]

    @property
    def media_roles(self) -> tuple[MediaRole, ...]:
        """Media that a sample of the task has beside the one that is learned."""
        return tuple(role for role in self.roles.get(self.task, ()) if role.is_trained)

    @property
    def transformer_folder(self) -> Path:
        """Where the transformer's configuration is; of two the first one's."""
        return self.folder / "transformer"

    @property
    def transformers(self) -> tuple[str, ...]:
        """The components that are trained: one transformer, or the two of `EXPERT_PARTS`."""
        return ("transformer",)

    @property
    def boundary_time(self) -> float:
        """Of two transformers, the time (0..1000) from which on the first one denoises."""
        raise NotImplementedError

    @property
    def weights_folder(self) -> Path:
        """Where the weights of what is trained are."""
        return self.transformer_folder if len(self.transformers) == 1 else self.folder

    @cached_property
    def usage(self) -> ReleaseUse:
        """How the folder's release is used, see `diffusion/usage.py`."""
        return usage_of(self.uses, self.setting)

    @property
    def takes_guidance(self) -> bool:
        """Whether the transformer takes the guidance scale as an input; else guidance is classifier-free."""
        return bool(self.transformer_config.get("guidance_embeds"))

    @property
    def guidance_argument(self) -> str:
        """The argument of the pipeline that the guidance scale is passed as."""
        return "guidance_scale" if self.takes_guidance else self.true_guidance

    @property
    def text_tokens(self) -> int:
        """Length that captions are padded to, in training and in sampling: the release's or `most_text_tokens`, or what
        the tokenizer says when that is less."""
        most = self.usage.text_tokens or self.most_text_tokens
        return min(most, int(self.component_config(self.tokenizer).get("model_max_length") or most))

    def caption_limits(self) -> dict[str, int]:
        """Tokenizer → how many tokens of a caption are read: `tokenizer`; where the folder has none under that name,
        every tokenizer that it has, with its own length."""
        if self.has_component(self.tokenizer):
            return {self.tokenizer: self.text_tokens}
        limits: dict[str, int] = {}
        for name in self.index:
            if name.startswith("tokenizer") and self.has_component(name):
                longest = self.component_config(name).get("model_max_length")
                limits[name] = int(longest or self.most_text_tokens)
        return limits

    @property
    def frames_per_second(self) -> float | None:
        """Of the clips that the released weights make; None: of pictures, and where the model is told."""
        return None if self.reads_fps else self.usage.fps

    @property
    @abstractmethod
    def geometry(self) -> MediaGeometry:
        """Sizes that the VAE and the transformer take."""

    @property
    def sound(self) -> SoundGeometry | None:
        """What is made of the sound of clips: its `SOUND` role is among `media_roles`, and `encode_conditions` makes
        latents of it. None: it is not looked at."""
        return None

    @property
    def further_latents(self) -> tuple[str, ...]:
        """Batch keys of latents that are learned beside `latents`, with noise of their own at the same time, by the
        samples that have them. Features have them from `encode_conditions`; `inputs` finds them in the batch, with
        noise."""
        return ()

    def requirements(self) -> list[Requirement]:
        """What the other components ask of the transformer's configuration."""
        return []

    def check(self) -> None:
        """Raise `ModelFolderError` when the pipeline is none of this family's, what noise levels follow from is
        missing, or the parts that are there do not fit together."""
        _ = self.task
        self.require("scheduler")
        where = str(self.transformer_folder / "config.json")
        problems = []
        for need in self.requirements():
            if need.value is None or self._is_unknown(need):
                continue
            held = self.transformer_config.get(need.setting, need.value)
            if held != need.value:
                what = f"{held}, but {need.source} asks for {need.value}"
                problems.append(Problem(what, where=where, key=need.setting))
        if problems:
            raise ModelFolderError("the transformer does not fit the folder's other parts", problems=problems)

    def _is_unknown(self, need: Requirement) -> bool:
        """Whether what asks is a component of which nothing is known: runs that use it say so themselves."""
        name = need.source.partition(":")[0]
        return self.lacks(name) and name not in self.noted

    # --- encoding: what is done once, or while training on raw media ------------------------------------------------

    @abstractmethod
    def encode_text(self, pipeline: DiffusionPipeline, captions: Sequence[str]) -> list[TextFeatures]:
        """Features of captions, one entry each, without padding that training can add again.

        Args:
            pipeline: From `components.load_encoders`: the family's pipeline without its transformer.
            captions: As they stand in the data; the empty one is what caption dropout and guidance use.
        """

    def encode_text_beside(
        self, pipeline: DiffusionPipeline, captions: Sequence[str], media: Mapping[str, torch.Tensor]
    ) -> list[TextFeatures]:
        """Features of captions that are read together with the media of a sample, for tasks of `text_reads_media`.

        Args:
            pipeline: As above.
            captions: Of one sample.
            media: The sample's, as `encode_conditions` is given them: (1, 3, T, H, W) uint8.
        """
        raise NotImplementedError

    @abstractmethod
    def encode_media(self, pipeline: DiffusionPipeline, pixels: torch.Tensor) -> torch.Tensor:
        """Normalised latents: the mode of the VAE's posterior, (B, C, H, W) or (B, C, T, H, W), in the VAE's dtype.

        Args:
            pipeline: As above.
            pixels: (B, 3, T, H, W) uint8 on any device; T is 1 for images.
        """

    def encode_conditions(
        self, pipeline: DiffusionPipeline, media: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """What else a task is conditioned on, by batch key (i2v: `condition_latents`, `image_embeds`); (B, …) each.

        Args:
            pipeline: As above.
            media: `target`, and each of `media_roles` by its name: (B, 3, T, H, W) uint8. Optional ones may lack.
        """
        return {}

    def vae_latents(self, vae: ModelMixin, latents: torch.Tensor) -> torch.Tensor:
        """Latents as the VAE decodes them: the inverse of what `encode_media` does after it. Here: of `scaled`.

        Args:
            vae: Of the pipeline.
            latents: (B, C, H, W) or (B, C, T, H, W), normalised, of any floating type.

        Raises:
            ConfigError: Its decoder needs more than latents.
        """
        return unscaled(vae, latents)

    @torch.no_grad()
    def decode(self, pipeline: DiffusionPipeline, latents: torch.Tensor) -> torch.Tensor:
        """Pictures or clips of normalised latents, (B, 3, T, H, W) uint8 on the VAE's device; T is 1 for pictures.

        Args:
            pipeline: From `components.load_encoders`.
            latents: (B, C, H, W) or (B, C, T, H, W).

        Raises:
            ConfigError: Its decoder needs more than latents.
        """
        vae = pipeline.vae
        ready = self.vae_latents(vae, latents.to(vae.device)).to(vae.dtype)
        pixels = as_bytes(vae.decode(ready, return_dict=False)[0])
        return pixels if pixels.dim() == 5 else pixels.unsqueeze(2)

    def condition_shapes(self, latent_shape: tuple[int, ...], given: Collection[str] = ()) -> ConditionShapes:
        """Shapes of what `encode_conditions` gives for a sample, for forecasts that encode nothing.

        Args:
            latent_shape: (C, H, W) or (C, T, H, W).
            given: Names of the media that the sample has. Those that every sample has may be left out.
        """
        return {}

    def seen_tokens(self, latent_shape: tuple[int, ...], given: Collection[str]) -> int:
        """How many tokens the media of a sample are among those of its caption, for tasks of `text_reads_media`, for
        forecasts that encode nothing. Arguments as of `condition_shapes`."""
        return 0

    def given_tokens(self, batch: Batch) -> int:
        """How many tokens the sequence of a sample's latents has for `latents_in_sequence`, for counts of FLOPs."""
        given = (batch[name] for name in self.latents_in_sequence if name in batch)
        return sum(self.geometry.tokens(tuple(each.shape[1:])) for each in given)

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a padded caption's features that do not follow from the transformer's configuration as most
        families' do, for forecasts that encode nothing."""
        return {}

    def text_of_connectors(self, content: Mapping[str, Any], where: str) -> TextFeatures:
        """Features of a caption from a file of Lightricks' trainer (`feature_store/precomputed.py`), for the families
        that it trains.

        Args:
            content: Of the file.
            where: The file.

        Raises:
            DataError: The file is not for this model.
        """
        raise DataError(f"features of LTX-2 are not for {self.transformer_class}", where=where)

    def pad_text(self, features: Sequence[TextFeatures]) -> dict[str, torch.Tensor]:
        """Captions' features as batch entries, (B, …). Here: stacked, since all are equally long."""
        return {key: torch.stack([each[key] for each in features]) for key in features[0]}

    # --- training ---------------------------------------------------------------------------------------------------

    @cached_property
    def noise_path(self) -> NoisePath:
        """How noise is put on latents, and what is learned. Here: flow matching."""
        return FlowPath()

    def given_latents(self, batch: Batch) -> torch.Tensor | None:
        """Which latents the model is given without noise, and learns nothing of: bool, broadcastable to the latents.
        None: it is given none.

        Args:
            batch: Latents, text features and conditions; also what `inputs` is called with.
        """
        return None

    @abstractmethod
    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Batch, guidance: float) -> dict[str, Any]:
        """Arguments of the transformer's forward.

        Args:
            noisy: Latents with noise, in the shape of `batch["latents"]`.
            sigma: (B,) noise levels in 0..1, or numbers of steps (`noise_path`), fp32 or fp64. What is made of them for
                the timestep keeps that precision.
            batch: Text features and conditions, in the dtype that the transformer computes in.
            guidance: `training.diffusion.guidance`, for transformers that take it as an input.
        """

    @abstractmethod
    def prediction(self, output: TransformerOutput, latent_shape: tuple[int, ...]) -> torch.Tensor:
        """The transformer's output (called with `return_dict=False`) as a prediction of what `noise_path` asks for (in
        flow matching ε − x), in the shape of latents.

        Args:
            output: What forward returned.
            latent_shape: (B, C, H, W) or (B, C, T, H, W).
        """

    def predictions(self, output: TransformerOutput, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        """`prediction` of each of the latents that a sample has, by batch key. Here: of the only ones.

        Args:
            output: As above.
            shapes: Batch key → shape.
        """
        return {LATENTS: self.prediction(output, shapes[LATENTS])}

    def settle_transformer(self, transformer: nn.Module) -> None:
        """Set right what a transformer of diffusers gets wrong in training. Most get nothing wrong.

        Args:
            transformer: Just built, parameters on meta.
        """
        return

    def init_weights(self, module: nn.Module) -> None:
        """From scratch: set a module's own parameters that torch's `reset_parameters` does not know. A module that has
        none of them is left alone. Most families have none."""
        return

    def released_shift(self, tokens: int) -> float:
        """The shift of noise levels that the folder's scheduler uses for a sample of so many tokens: by resolution when
        it shifts dynamically, otherwise its `shift`, or UniPC's `flow_shift`."""
        scheduler = self.component_config("scheduler")
        if scheduler.get("use_dynamic_shifting"):
            return self.resolution_shift(tokens)
        return float(scheduler.get("flow_shift", scheduler.get("shift", 1.0)))

    def released_end(self) -> float:
        """The noise level that the folder's scheduler stretches its last step to (`shift_terminal`), else 0."""
        return float(self.component_config("scheduler").get("shift_terminal") or 0.0)

    def resolution_shift(self, tokens: int) -> float:
        """exp(μ), μ linear in the tokens through the scheduler's (base_image_seq_len, base_shift) and
        (max_image_seq_len, max_shift); the defaults are FLUX.1's (Esser et al. 2024, section 5.3.2)."""
        scheduler = self.component_config("scheduler")
        few, many = scheduler.get("base_image_seq_len", 256), scheduler.get("max_image_seq_len", 4096)
        low, high = scheduler.get("base_shift", 0.5), scheduler.get("max_shift", 1.15)
        return math.exp(low + (high - low) / (many - few) * (tokens - few))

    # --- sampling ---------------------------------------------------------------------------------------------------

    def guided(self, sampling: SamplingArguments, prompts: Sequence[str], latents: torch.Tensor) -> dict[str, Any]:
        """The arguments that most pipelines take: size, steps, noise and guidance, which is classifier-free and away
        from the negative prompt unless the transformer takes it as an input. Arguments as of `pipeline_arguments`.

        Raises:
            ConfigError: There is a negative prompt, which would have no effect.
        """
        geometry = self.geometry
        size = {
            "height": latents.shape[-2] * geometry.spatial_ratio,
            "width": latents.shape[-1] * geometry.spatial_ratio,
        }
        if geometry.is_video:
            size[self.frames_argument] = geometry.frames(tuple(latents.shape[1:]))
        if self.takes_guidance:
            self.refuse_negative_prompt(sampling, "this transformer takes guidance as an input")
            negative = {}
        else:
            negative = {"negative_prompt": [sampling.negative_prompt] * len(prompts)}
        return {
            **size,
            **self.usage.call,
            **self._guidance(sampling),
            **negative,
            "num_inference_steps": sampling.num_inference_steps,
            "latents": latents,
            "max_sequence_length": self.text_tokens,
            "output_type": "np",
        }

    def _guidance(self, sampling: SamplingArguments) -> Mapping[str, float]:
        """The request's scale, or the several numbers of the release (`ReleaseUse.guidance`)."""
        if sampling.guidance_scale is not None:
            return {self.guidance_argument: sampling.guidance_scale}
        return self.usage.guidance if isinstance(self.usage.guidance, Mapping) else {}

    def default_size(self, pipeline: DiffusionPipeline) -> tuple[int | None, int | None]:
        """Height and width of a sample when a request names none: the release's, the default of the pipeline's
        argument, or its sample size in latents.

        Args:
            pipeline: The family's.
        """
        if self.usage.size is not None:
            return self.usage.size
        parameters = inspect.signature(pipeline.__call__).parameters
        latents: int | None = attribute_at(pipeline, "default_sample_size")
        ratio: int | None = attribute_at(pipeline, "vae_scale_factor")
        square = latents * ratio if latents and ratio else None
        height, width = (
            parameters[name].default or square if name in parameters else None for name in ("height", "width")
        )
        return height, width

    def refuse_negative_prompt(self, sampling: SamplingArguments, reason: str) -> None:
        """Raise `ConfigError` when there is a negative prompt, which would have no effect."""
        if sampling.negative_prompt:
            raise ConfigError(
                f"'{sampling.negative_prompt}' has no effect: {reason}",
                key="sampling.negative_prompt",
                way_out="Leave it out.",
            )

    def prepare_pipeline(self, pipeline: DiffusionPipeline, sampling: SamplingArguments) -> None:
        """Set what a pipeline takes otherwise than by arguments, before each batch. Most take all by arguments."""
        return

    @abstractmethod
    def pipeline_arguments(
        self, sampling: SamplingArguments, prompts: Sequence[str], latents: torch.Tensor
    ) -> dict[str, Any]:
        """Keyword arguments of the family's pipeline for a batch, besides `prompt`, `generator` and `image`.

        Args:
            sampling: Steps, guidance, size.
            prompts: As many as latents.
            latents: (B, C, H, W) or (B, C, T, H, W) starting noise; the pipeline's own layout is made of it here.
        """

    def further_shapes(self, frames: int, fps: float) -> dict[str, tuple[int, ...]]:
        """Shapes of the `further_latents` of a clip, without the batch axis."""
        return {}

    def starting_noise(self, pipeline: DiffusionPipeline, noise: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Keyword arguments of the pipeline for the noise that a sample starts from, where it does not take it as
        `pipeline_arguments` gives it.

        Args:
            pipeline: The family's.
            noise: Batch key → (B, …), of `latents` and of `further_latents`.
        """
        return {}

    def pipeline_media(self, media: Mapping[str, Any], sampling: SamplingArguments) -> dict[str, Any]:
        """Keyword arguments of the pipeline for the media of a prompt: each under the argument that its role names.

        Args:
            media: Role → picture, or list of pictures, in the size of the sample.
            sampling: As above.
        """
        roles = self.roles.get(self.task, ())
        several = {role.argument for role in roles if role.is_whole}
        given: dict[str, Any] = {}
        for role in roles:
            if role.name in media and role.argument in several:
                given.setdefault(role.argument, []).append(media[role.name])
            elif role.name in media:
                given[role.argument] = media[role.name]
        return given
