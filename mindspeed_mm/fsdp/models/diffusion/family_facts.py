"""The fields that a family of generators sets, and what follows from them and from a folder's JSON files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from mindspeed_mm.core.errors import ConfigError, ModelFolderError, Problem
from mindspeed_mm.core.media_geometry import MediaGeometry, SoundGeometry
from mindspeed_mm.fsdp.models.diffusion.few_steps import FewSteps
from mindspeed_mm.fsdp.models.diffusion.generator_folder import GeneratorFolder, ReleaseUse, usage_of
from mindspeed_mm.fsdp.models.diffusion.latents import LatentScale, LatentSizes
from mindspeed_mm.fsdp.models.diffusion.media_roles import MediaRole
from mindspeed_mm.fsdp.models.diffusion.text_rows import EMBEDS, CaptionRows
from mindspeed_mm.fsdp.models.structure.stages import CutPoints
from mindspeed_mm.fsdp.ops.context_attention.sample_plan import SamplePlan

_WIDTHS = ("d_model", "hidden_size", "latent_channels", "latent_dim", "z_dim")
"""Settings of encoders and VAEs that state how wide their features are."""


@dataclass(frozen=True)
class Requirement:
    """A setting of the transformer that another component of the folder fixes."""

    setting: str
    value: object
    """None: nothing is asked."""
    source: str
    """Where the value comes from, for messages: a component, alone or before a colon."""


class FamilyFacts:
    """The table of a family: its adapter sets the fields that differ from these defaults."""

    transformer_class: ClassVar[str]
    """Name of the transformer's class in diffusers, or among `own_classes`."""
    own_classes: ClassVar[Mapping[str, str]] = {}
    """Class of a transformer, pipeline or component that neither diffusers nor transformers has → the module that has
    it. They are known by name, whatever library `model_index.json` takes them from."""
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
    tokenizer: ClassVar[str] = "tokenizer"
    """The tokenizer whose tokens the transformer reads one by one."""
    tokenizer_limits: ClassVar[bool] = True
    """Whether captions end at the tokenizer's `model_max_length`, too: not where that counts the template around them,
    or where the transformer's positions follow from `most_text_tokens`."""
    encoders: ClassVar[tuple[str, ...]] = ("vae",)
    """Components without which nothing can be encoded; others of the pipeline may be null in `model_index.json`."""
    layout_way_out: ClassVar[str] = (
        "Name a folder in diffusers' layout: the one with transformer/, vae/ and scheduler/."
    )
    """What to do where the folder is in another layout."""
    unlisted_way_out: ClassVar[str] = "Copy the model folder again; or train on features, and do not sample."
    """What to do where `model_index.json` lists none of these."""
    sizes: ClassVar[LatentSizes]
    """Ratios, channels and limits of latents: what `geometry` is made of."""
    vae_class: ClassVar[str] = ""
    """The only class of VAE whose latents the transformer knows; empty: `widths` say which fit."""
    widths: ClassVar[Mapping[str, str]] = {}
    """Setting of the transformer → the component whose width it has to be: an encoder's, or the VAE's channels. For
    `in_channels`, `input_channels` says how many of these it is."""
    captions: ClassVar[CaptionRows] = CaptionRows()
    """How the pipeline encodes captions."""
    scale: ClassVar[LatentScale] = LatentScale()
    """How latents are normalised."""
    takes_tokens: ClassVar[bool] = False
    """Whether the transformer takes latents as rows of tokens of the geometry's patch (`pack`)."""
    pipeline_takes_tokens: ClassVar[bool] = False
    """Whether the pipelines take starting noise as such rows, too."""
    time_scale: ClassVar[int] = 1000
    """Largest time that the transformer takes: 1, or 1000."""
    text_inputs: ClassVar[Mapping[str, str]] = {"encoder_hidden_states": EMBEDS}
    """Argument of the transformer's forward → batch key of the text features that it takes."""
    starts_with_frame: ClassVar[frozenset[str]] = frozenset()
    """Tasks whose first latent frame is given without noise."""
    zeros: ClassVar[tuple[str, ...]] = ()
    """Names of parameters that are zero from scratch. Modulation tables, `…scale_shift_table`, need no entry."""
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
    rate_argument: ClassVar[str] = ""
    """What they call the frames per second; empty: they do not take the rate."""
    draws_blocks: ClassVar[bool] = False
    """Whether clips can be drawn in blocks of frames (`DiffusionAdapter.causal`)."""
    distilled_tasks: ClassVar[frozenset[str]] = frozenset({"t2i", "t2v"})
    """Tasks for which a student of few steps can be distilled: beside the noisy latents a batch holds nothing but text
    features and what `condition_shapes` says."""
    true_guidance: ClassVar[str] = "guidance_scale"
    """What the pipelines call the scale of classifier-free guidance."""
    guidance_by_default: ClassVar[bool] = False
    """Whether the transformer takes the guidance scale as an input where its `guidance_embeds` is not set."""
    guidance_off: ClassVar[float] = 1.0
    """The largest scale of classifier-free guidance that switches it off."""


class FamilyFolder(FamilyFacts, GeneratorFolder):
    """One family, seen through one model folder in diffusers' layout. Making one reads JSON files only.

    Args:
        folder: With `model_index.json`, `transformer/`, `vae/`, text encoders, tokenizers and `scheduler/`.
        transformer: Settings of the transformer's configuration to change (`model.transformer` of the YAML).
        task: What is trained or sampled (`model.task`); None: the first that the folder's pipeline does.
    """

    def __init__(self, folder: Path, transformer: Mapping[str, object] | None = None, task: str | None = None) -> None:
        super().__init__(folder, transformer)
        self._asked_task = task
        self.vae_options: tuple[str, ...] = ()
        """What the VAE does to take less memory: `tiling`, `slicing`."""
        self.quantize_encoders: str | None = None
        """How the text and picture encoders keep their linear layers: `nf4`, `int8`; None: as stored."""

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
        if len(self.transformers) == 1:
            return self.transformer_folder
        return self.folder

    @cached_property
    def usage(self) -> ReleaseUse:
        """How the folder's release is used, see `diffusion/generator_folder.py`; a student of few steps by what it was
        distilled to."""
        found, few = usage_of(self.uses, self.setting), self.few_steps
        if few is None:
            return found
        scale = few.guidance if self.takes_guidance else self.guidance_off
        return replace(found, steps=len(few.denoising_step_list), guidance=scale)

    @property
    def few_steps(self) -> FewSteps | None:
        """What the transformer was distilled to; None: it is no student of few steps."""
        return FewSteps.of_config(self.transformer_config, str(self.transformer_folder / "config.json"))

    def note_few_steps(self, few: FewSteps | None) -> None:
        """From now on the transformer is a student: its configuration says so, wherever it is written. None changes
        nothing."""
        if few is None:
            return
        self._changes |= few.as_config()
        for derived in ("transformer_config", "usage"):
            self.__dict__.pop(derived, None)

    @property
    def embeds_guidance(self) -> bool:
        """Whether the transformer takes the guidance scale as an input."""
        return bool(self.transformer_config.get("guidance_embeds", self.guidance_by_default))

    @property
    def takes_guidance(self) -> bool:
        """Whether the pipeline's guidance is that input alone; else it is classifier-free."""
        return self.embeds_guidance

    @property
    def guidance_argument(self) -> str:
        """The argument of the pipeline that the guidance scale is passed as."""
        if self.takes_guidance:
            return "guidance_scale"
        return self.true_guidance

    @property
    def text_tokens(self) -> int:
        """Length that captions are padded to, in training and in sampling: the release's or `most_text_tokens`, or what
        the tokenizer says when that is less."""
        most = self.usage.text_tokens or self.most_text_tokens
        if not self.tokenizer_limits:
            return most
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
        if self.reads_fps:
            return None
        return self.usage.fps

    @cached_property
    def geometry(self) -> MediaGeometry:
        """Sizes that the VAE and the transformer take. Here: by `sizes`."""
        return self.sizes.geometry(self.component_config("vae"), self.transformer_config)

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
        """What the other components ask of the transformer's configuration. Here: `widths`."""
        needs = []
        for setting, component in self.widths.items():
            width, source = self.width_of(component)
            if setting == "in_channels" and width:
                width, words = self.input_channels(width)
                source += words
            needs.append(Requirement(setting, width, source))
        return needs

    def width_of(self, component: str) -> tuple[int | None, str]:
        """Width of an encoder's features, or channels of a VAE, and where they are stated. None: the folder has no such
        component, or its configuration is unknown."""
        if not self.has_component(component):
            return None, component
        config = self.component_config(component)
        config = config.get("text_config") or config
        name = next((name for name in _WIDTHS if name in config), "")
        return config.get(name), f"vae: {name}" if component == "vae" else component

    def input_channels(self, channels: int) -> tuple[int, str]:
        """Channels of the transformer's input for a VAE with this many, and how messages call the difference, such as
        ` × 4`. Here: the channels of a token, if the transformer takes tokens."""
        of_token = math.prod(self.geometry.patch)
        if not self.takes_tokens or of_token == 1:
            return channels, ""
        return of_token * channels, f" × {of_token}"

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
        vae = self.component_config("vae").get("_class_name", self.vae_class)
        if self.vae_class and vae != self.vae_class:
            what = f"{vae}, but {self.transformer_class} was trained on latents of {self.vae_class}"
            problems.append(Problem(what, where=str(self.folder / "vae" / "config.json"), key="_class_name"))
        if problems:
            raise ModelFolderError("the transformer does not fit the folder's other parts", problems=problems)

    def _is_unknown(self, need: Requirement) -> bool:
        """Whether what asks is a component of which nothing is known: runs that use it say so themselves."""
        name = need.source.partition(":")[0]
        return self.lacks(name) and name not in self.noted


_OWN = ("to_q", "to_k", "to_v", "to_out.0")
_OF_CAPTIONS = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""Of captions that join in an attention."""


def layers_of(*attentions: str, with_captions: bool = False) -> tuple[str, ...]:
    """Patterns of the layers of some attentions, such as LoRA adapts.

    Args:
        attentions: Patterns of the attentions.
        with_captions: Also the layers of captions that join in.
    """
    layers = (*_OWN, *_OF_CAPTIONS) if with_captions else _OWN
    patterns: list[str] = []
    for attention in attentions:
        patterns += [f"{attention}.{layer}" for layer in layers]
    return tuple(patterns)
