"""Kinds of models, by what a run does differently for each: language models answer, generators draw."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.model_kinds import GENERATOR, LANGUAGE, UNIFIED, ModelKind
from mindspeed_mm.fsdp.checkpoint.diffusers_folder import save_transformer
from mindspeed_mm.fsdp.checkpoint.hf import save_hf
from mindspeed_mm.fsdp.data import MMDataset
from mindspeed_mm.fsdp.loss.denoised_pictures import WithDenoisedPictures
from mindspeed_mm.fsdp.loss.denoising import DenoisingObjective, check_caption_dropout
from mindspeed_mm.fsdp.loss.head_loss import HeadLoss
from mindspeed_mm.fsdp.loss.language_objective import build_language_objective
from mindspeed_mm.fsdp.loss.objectives import Objective, TokenCrossEntropy
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.components import load_encoders
from mindspeed_mm.fsdp.models.diffusion.live_encoding import LiveEncoder
from mindspeed_mm.fsdp.models.diffusion.velocity import Denoiser, GuidedDenoiser
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.cards import families
from mindspeed_mm.fsdp.plan.model_plan import ModelPlan
from mindspeed_mm.fsdp.plan.outline import Outline
from mindspeed_mm.fsdp.sampling.defaults import with_rate_of
from mindspeed_mm.fsdp.sampling.sampler import DiffusionSampler
from mindspeed_mm.fsdp.train.assemble import Assembled
from mindspeed_mm.fsdp.train.hooks.sampling import SampleHook, build_sample_hook
from mindspeed_mm.fsdp.train.run.data import RunData
from mindspeed_mm.fsdp.train.run.job import Job
from mindspeed_mm.fsdp.train.run.record import RunRecord
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype
from mindspeed_mm.fsdp.utils.ranks import Ranks

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from mindspeed_mm.fsdp.train.rollouts.order import RolloutSource

# What only post-training needs is imported inside the methods that build it: a plain run starts without it.


class Family(ABC):
    """What a kind of model asks of a run. A further kind (preferences, rewards, speech) is a further subclass.

    Args:
        arguments: The whole configuration.
    """

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments

    @abstractmethod
    def trial_options(self, model: nn.Module) -> str | None:
        """Options of `mm infer` that try a trained model, for the last line of a run; None: it cannot be tried so."""

    @abstractmethod
    def build_objective(self, assembled: Assembled, job: Job, data: RunData) -> Objective:
        """What the model is trained for.

        Raises:
            ConfigError: `features.loss_cfg` asks for what this kind of model, or this model, does not have.
        """

    @abstractmethod
    def build_simulated_objective(self, outline: Outline, head: HeadLoss | None, plan: ModelPlan) -> Objective:
        """As `build_objective`, for one step without data, chance or other ranks.

        Args:
            outline: The model.
            head: The loss of its output head, if it has one.
            plan: Resolved for it.
        """

    @abstractmethod
    def save_model(self, model: nn.Module, save: WholeSave) -> None:
        """Write the whole model as its library loads it; called by all ranks. It may be sharded."""

    def rollout_source(self, assembled: Assembled, job: Job, data: RunData, objective: Objective) -> RolloutSource:
        """What draws and judges the samples that the model is trained on.

        Args:
            assembled: The model.
            job: This rank.
            data: Its prompts.
            objective: What it is trained for.

        Raises:
            ConfigError: This kind of model, or this model, cannot draw them.
        """
        raise ConfigError(
            f"{self.arguments.posttrain.method} is not built for this kind of model",
            key="posttrain.method",
            way_out="Leave it out.",
        )

    def sampling_hook(self, model: nn.Module, job: Job, record: RunRecord) -> SampleHook | None:
        """The hook that shows what the model makes while it is trained; None where nothing is asked for, or this kind
        of model makes nothing to look at.

        Raises:
            MMError: Prompts, sizes or encoders are off.
        """
        return None


@dataclass(frozen=True)
class WholeSave:
    """How a whole model is written."""

    folder: Path
    """Appears when complete; one that stands there is replaced."""
    source: Path
    """The folder that the run started from."""
    dtype: torch.dtype | None
    """Of the weights; None: as `source` has them."""
    ranks: Ranks
    """All of them."""
    write_view: Callable[[Path], None] | None
    """Adds to the folder how training looked at its rows."""


_QUESTIONS = {
    "text": "--prompt 'a question'",
    "see": "--image a.png --prompt 'a question'",
    "omni": "--audio a.wav --prompt 'a question'",
    "hear": "--audio a.wav",
}
"""Task of a card → options of `mm infer`. Families that speak tokens are not tried so."""


class LanguageFamily(Family):
    """Models of transformers, and of plugins, that are trained on tokens."""

    def trial_options(self, model: nn.Module) -> str | None:
        """What such models are asked, by their family's card."""
        names = {each.__name__ for each in type(model).__mro__}
        for card in families():
            if card.model_class.rpartition(".")[2] in names:
                return _QUESTIONS.get(card.task)
        return _QUESTIONS["text"]

    def build_objective(self, assembled: Assembled, job: Job, data: RunData) -> Objective:
        """Cross-entropy of the next token, with the terms that stand beside it; or what a method of post-training asks
        for."""
        if self.arguments.posttrain.method:
            from mindspeed_mm.fsdp.train.posttrain import build_posttrain_objective

            return build_posttrain_objective(self.arguments, assembled, job, data)
        return build_language_objective(self.arguments, assembled.model, assembled.applied.head, job.state.token_groups)

    def build_simulated_objective(self, outline: Outline, head: HeadLoss | None, plan: ModelPlan) -> Objective:
        """The same; statistics of routers are summed over no ranks."""
        if self.arguments.posttrain.method == "dpo":
            from mindspeed_mm.fsdp.train.posttrain import build_simulated_pairs

            return build_simulated_pairs(self.arguments, outline.model, head)
        return build_language_objective(self.arguments, outline.model, head, lambda: ())

    @override
    def rollout_source(self, assembled: Assembled, job: Job, data: RunData, objective: Objective) -> RolloutSource:
        from mindspeed_mm.fsdp.loss.policy_gradient import PolicyObjective
        from mindspeed_mm.fsdp.train.rollouts.build import build_text_rollouts

        assert isinstance(objective, PolicyObjective)
        return build_text_rollouts(self.arguments, assembled, job, data, objective)

    def save_model(self, model: nn.Module, save: WholeSave) -> None:
        """As `from_pretrained` of transformers loads it."""
        save_hf(
            model,
            save.folder,
            save.source,
            dtype=save.dtype,
            overwrite=True,
            ranks=save.ranks,
            write_view=save.write_view,
        )


class UnifiedFamily(LanguageFamily):
    """Models that answer in words and draw by denoising, in one sequence.

    Args:
        arguments: The whole configuration.
        device: Where the frozen VAE runs.
    """

    def __init__(self, arguments: Arguments, device: torch.device) -> None:
        super().__init__(arguments)
        self._device = device

    @override
    def trial_options(self, model: nn.Module) -> str | None:
        return "--prompt 'a prompt' --draw a.png"

    @override
    def build_objective(self, assembled: Assembled, job: Job, data: RunData) -> Objective:
        from mindspeed_mm.fsdp.models.diffusion.picture_vae import PictureVAE

        config: Any = assembled.model.config
        vae = config.vae_config
        folder = Path(str(self.arguments.model.model_name_or_path))
        encoder = PictureVAE(folder, vae["z_channels"], vae["downsample"], self._device, self._exact_dtype)
        words = build_language_objective(
            self.arguments, assembled.model, assembled.applied.head, job.state.token_groups
        )
        return self._both(words, config, encoder.encode)

    @property
    def _exact_dtype(self) -> torch.dtype:
        """What latents are encoded and mixed with noise in."""
        return torch.promote_types(torch_dtype(self.arguments.parallel.fsdp_plan.computed_in), torch.float32)

    @override
    def build_simulated_objective(self, outline: Outline, head: HeadLoss | None, plan: ModelPlan) -> Objective:
        words = build_language_objective(self.arguments, outline.model, head, lambda: ())
        return self._both(words, outline.model.config, None)

    def _both(
        self, words: Objective, config: Any, encode: Callable[[torch.Tensor, int], torch.Tensor] | None
    ) -> Objective:
        assert isinstance(words, TokenCrossEntropy)  # `check_unified_loss`
        loss_cfg, diffusion = self.arguments.features.loss_cfg, self.arguments.training.diffusion
        return WithDenoisedPictures(words, config, loss_cfg, diffusion, encode, self._exact_dtype)


class GeneratorFamily(Family):
    """Models that draw pictures and clips.

    Args:
        arguments: The whole configuration.
        adapter: What is special about the model.
        device: Where its encoders run.
    """

    @override
    def trial_options(self, model: nn.Module) -> str | None:
        return "--prompt 'a prompt' --out samples"

    def __init__(self, arguments: Arguments, adapter: DiffusionAdapter, device: torch.device) -> None:
        super().__init__(arguments)
        self.adapter, self._device = adapter, device
        self._encodes = False

    @cached_property
    def encoders(self) -> DiffusionPipeline:
        """The frozen encoders, loaded when something is encoded or decoded for the first time."""
        return load_encoders(self.adapter, self._device)

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the transformer computes in."""
        return torch_dtype(self.arguments.parallel.fsdp_plan.computed_in)

    @property
    def denoiser(self) -> Denoiser:
        """The path through the transformer; of rollouts that are guided, with their guidance."""
        told, scale = self.arguments.training.diffusion.guidance, self.arguments.posttrain.flow.guidance_scale
        if self.arguments.posttrain.method == "grpo" and scale > 1:
            return GuidedDenoiser(self.adapter, self.compute_dtype, told, scale)
        return Denoiser(self.adapter, self.compute_dtype, told)

    def build_objective(self, assembled: Assembled, job: Job, data: RunData) -> Objective:
        """Denoising, on features or on raw media; or what `posttrain.method` names."""
        posttrain = self.arguments.posttrain
        if not posttrain.method:
            return self.denoising(data.train, data.validation)
        if posttrain.method == "dpo":
            from mindspeed_mm.fsdp.loss.flow_pair_objective import FlowPairObjective
            from mindspeed_mm.fsdp.train.reference import describe_reference
            from mindspeed_mm.fsdp.train.rollouts.build_flow import generator_reference

            reference = generator_reference(self.arguments, assembled, job.device)
            assert reference is not None
            denoising = self.denoising(data.train, data.validation)
            return FlowPairObjective(denoising, posttrain.dpo, reference, describe_reference(self.arguments))
        from mindspeed_mm.fsdp.loss.flow_objectives import FlowPolicyObjective, NftObjective

        if posttrain.method == "grpo":
            return FlowPolicyObjective(self.denoiser, posttrain.grpo)
        return NftObjective(self.denoiser, posttrain.nft, posttrain.grpo.adv_clip_max)

    def denoising(self, *datasets: MMDataset | None) -> DenoisingObjective:
        """The objective for data sets of features, or of raw media; None among them is passed over.

        Raises:
            ConfigError: Captions are dropped, and the features hold no empty one.
        """
        sets = [dataset for dataset in datasets if dataset is not None]
        for dataset in sets:
            self.adapter.note_components(dataset.noted_components)
        self._encodes = any(dataset.is_raw for dataset in sets)
        diffusion, null_text = self.arguments.training.diffusion, None
        if sets:  # samples that are trained on may be features, and those for validation not
            null_text = sets[0].null_text()
            has_empty_caption = null_text is not None
            check_caption_dropout(self.adapter, diffusion, encodes=sets[0].is_raw, has_empty_caption=has_empty_caption)
        return DenoisingObjective(
            self.adapter,
            diffusion,
            seed=self.arguments.training.seed,
            compute_dtype=self.compute_dtype,
            null_text=null_text,
            encode=LiveEncoder(self.adapter, self.encoders) if self._encodes else None,
        )

    def build_simulated_objective(self, outline: Outline, head: HeadLoss | None, plan: ModelPlan) -> Objective:
        """Denoising on features that are there, each with its caption."""
        training = self.arguments.training
        diffusion = training.diffusion.model_copy(update={"caption_dropout": 0.0})
        denoising = DenoisingObjective(
            self.adapter, diffusion, seed=training.seed, compute_dtype=plan.precision.compute_dtype
        )
        if self.arguments.posttrain.method != "dpo":
            return denoising
        from mindspeed_mm.fsdp.loss.flow_pair_objective import FlowPairObjective

        dpo = self.arguments.posttrain.dpo.model_copy(update={"histogram_path": None})
        return FlowPairObjective(denoising, dpo, lambda: nullcontext(outline.model))

    def rollout_source(self, assembled: Assembled, job: Job, data: RunData, objective: Objective) -> RolloutSource:
        """The model draws from prompts."""
        from mindspeed_mm.fsdp.loss.flow_objectives import RewardObjective
        from mindspeed_mm.fsdp.train.rollouts.build_flow import build_flow_rollouts

        assert isinstance(objective, RewardObjective)
        return build_flow_rollouts(
            self.arguments,
            assembled,
            job,
            data,
            objective,
            denoise=self.denoiser,
            encoders=self.encoders,
        )

    def save_model(self, model: nn.Module, save: WholeSave) -> None:
        """The transformer alone, as diffusers loads it: the other components are not trained."""
        save_transformer(model, save.folder, dtype=save.dtype, overwrite=True, ranks=save.ranks)

    def sampling_hook(self, model: nn.Module, job: Job, record: RunRecord) -> SampleHook | None:
        """The hook that `training.sampling` asks for; its rounds are shared by the ranks that hold different
        samples."""
        training = self.arguments.training
        return build_sample_hook(
            self.adapter,
            lambda: DiffusionSampler(self.adapter, model, self.encoders, self.compute_dtype),
            with_rate_of(self.arguments.data, training.sampling),
            training.save,
            record,
            rank=job.state.data_rank,
            world_size=job.state.data_size,
            group=job.data_group,
            keeps=job.state.is_first_of_its_samples,
            parks_encoders=not self._encodes,
        )


FAMILIES: dict[ModelKind, Callable[[Arguments, Any, torch.device], Family]] = {
    LANGUAGE: lambda arguments, _adapter, _device: LanguageFamily(arguments),
    GENERATOR: GeneratorFamily,
    UNIFIED: lambda arguments, _adapter, device: UnifiedFamily(arguments, device),
}
"""Kind of model → its family, of the configuration, the model's adapter and the device."""


def family_of(model: nn.Module, arguments: Arguments, device: torch.device) -> Family:
    """The family of a model."""
    facts = facts_of(model)
    return FAMILIES[facts.kind](arguments, facts.adapter, device)
