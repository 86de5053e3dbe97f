"""What a run does for models that draw pictures and clips."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn
from typing_extensions import override

from mindspeed_mm.fsdp.checkpoint.diffusers_folder import save_transformer
from mindspeed_mm.fsdp.data import MMDataset
from mindspeed_mm.fsdp.loss.denoising import DenoisingObjective, check_caption_dropout
from mindspeed_mm.fsdp.loss.head_loss import HeadLoss
from mindspeed_mm.fsdp.loss.objectives import Objective
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.components import load_encoders
from mindspeed_mm.fsdp.models.diffusion.few_steps import FewSteps, few_steps_kept
from mindspeed_mm.fsdp.models.diffusion.live_encoding import LiveEncoder
from mindspeed_mm.fsdp.models.diffusion.velocity import Denoiser, GuidedDenoiser
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.rules.distillation import reads_trajectories
from mindspeed_mm.fsdp.plan.model_plan import ModelPlan
from mindspeed_mm.fsdp.plan.outline import Outline
from mindspeed_mm.fsdp.sampling.defaults import as_trained
from mindspeed_mm.fsdp.sampling.sampler import DiffusionSampler
from mindspeed_mm.fsdp.train.assemble import Assembled
from mindspeed_mm.fsdp.train.family import Family, WholeSave
from mindspeed_mm.fsdp.train.hooks.sampling import SampleHook, build_sample_hook
from mindspeed_mm.fsdp.train.run.data import RunData
from mindspeed_mm.fsdp.train.run.job import Job
from mindspeed_mm.fsdp.train.run.record import RunRecord
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from mindspeed_mm.fsdp.train.rollouts.order import RolloutSource


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
        adapter.note_few_steps(FewSteps.of_run(arguments.training, arguments.posttrain))
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

    @override
    def warnings(self) -> list[str]:
        kept = few_steps_kept(self.adapter.few_steps, self.arguments.posttrain.method)
        if kept:
            return [kept]
        return []

    def build_objective(self, assembled: Assembled, job: Job, data: RunData) -> Objective:
        """Denoising, on features or on raw media; or what `posttrain.method` names."""
        posttrain = self.arguments.posttrain
        if not posttrain.method:
            return self.denoising(data.train, data.validation)
        if posttrain.method == "dmd":
            from mindspeed_mm.fsdp.train.distillation.build import build_distillation

            self._encodes = data.train.is_raw
            if reads_trajectories(posttrain):
                from mindspeed_mm.fsdp.train.distillation.regression import build_regression

                return build_regression(
                    self.arguments.model,
                    self.arguments.training,
                    self.arguments.posttrain,
                    data,
                    denoise=self.denoiser,
                    encoders=lambda: self.encoders,
                )
            return build_distillation(
                self.arguments, assembled, job, data, denoise=self.denoiser, encoders=lambda: self.encoders
            )
        if posttrain.method == "dpo":
            from mindspeed_mm.fsdp.loss.flow_pair_objective import FlowPairObjective
            from mindspeed_mm.fsdp.train.reference import describe_reference
            from mindspeed_mm.fsdp.train.rollouts.flow import generator_reference

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
        """Denoising on features that are there, each with its caption; or what goes through the model in its place."""
        training = self.arguments.training
        if reads_trajectories(self.arguments.posttrain):
            from mindspeed_mm.fsdp.train.distillation.regression import simulated_regression

            return simulated_regression(
                self.arguments.model,
                self.arguments.training,
                self.arguments.posttrain,
                self.adapter,
                plan.precision.compute_dtype,
            )
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
        from mindspeed_mm.fsdp.train.rollouts.flow import build_flow_rollouts

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
            as_trained(self.arguments.data, training.sampling),
            training.save,
            record,
            rank=job.state.data_rank,
            world_size=job.state.data_size,
            group=job.data_group,
            keeps=job.state.is_first_of_its_samples,
            parks_encoders=not self._encodes,
        )
