"""Carries a plan out, in the order of `resolve.py`. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from mindspeed_mm.fsdp.distributed.context.apply import ContextParallel
from mindspeed_mm.fsdp.distributed.parallel_state import ParallelState
from mindspeed_mm.fsdp.distributed.pipeline.apply import Pipeline, split_into_stages
from mindspeed_mm.fsdp.distributed.sharding.fully_shard import expect_views
from mindspeed_mm.fsdp.distributed.tensor.collectives import split_vocabulary
from mindspeed_mm.fsdp.distributed.torch_parallelize import ParallelApplier
from mindspeed_mm.fsdp.distributed.towers.idle import IdleTowers
from mindspeed_mm.fsdp.distributed.towers.media import MediaSharing
from mindspeed_mm.fsdp.features.apply_features import FeaturesApplier
from mindspeed_mm.fsdp.loss.build_head_loss import apply_head_loss
from mindspeed_mm.fsdp.loss.head_loss import HeadLoss
from mindspeed_mm.fsdp.models.loading.meta_device import materialize
from mindspeed_mm.fsdp.models.lora.apply import initialize_lora
from mindspeed_mm.fsdp.models.modelhub import LoadReport, ModelHub
from mindspeed_mm.fsdp.ops.collectives import AxisRanks
from mindspeed_mm.fsdp.params.argument import FeatureArguments, ModelArguments, ParallelArguments
from mindspeed_mm.fsdp.params.training_args import TrainingArguments
from mindspeed_mm.fsdp.plan.model_plan import ModelPlan
from mindspeed_mm.fsdp.plan.outline import Outline

EVERYTHING = ("*",)
"""The pattern of all names."""


@dataclass(frozen=True)
class AppliedPlan:
    """A model that is split and sharded, and what the training step must know of it."""

    model: nn.Module
    head: HeadLoss | None
    towers: IdleTowers | None
    """Hooks that keep ranks in step which lack a modality."""
    context: ContextParallel | None
    """How sequences are spread over ranks."""
    media: MediaSharing | None
    """How towers share media."""
    pipeline: Pipeline | None
    """How layers are spread over ranks; `model` is then this rank's part."""


def apply_plan(
    outline: Outline, plan: ModelPlan, model_args: ModelArguments, feature_args: FeatureArguments, state: ParallelState
) -> AppliedPlan:
    """Do to a model what the plan says, in place. Every rank calls it.

    Args:
        outline: The model, whole; its values, if it has any, are kept.
        plan: Resolved for it.
        model_args: The `model` section that it was resolved from.
        feature_args: The `features` section that it was resolved from.
        state: The groups of the job.
    """
    model, parallel = outline.model, plan.parallel
    pipeline = None
    if parallel.stages is not None:
        pipeline = split_into_stages(model, parallel.stages, parallel.section, state)

    # Both hooks read full hidden states and modules by their own names: they stand before sharding.
    head = towers = None
    if plan.head is not None:
        head = apply_head_loss(model, plan.head)
    if plan.idle and pipeline is None:
        towers = IdleTowers(model, plan.idle)

    axes = ParallelApplier(parallel.section, plan=parallel, pipeline=pipeline)
    ranks = None
    if plan.features.distributed:
        ranks = AxisRanks(state.axis_mesh("tp"))
    features = FeaturesApplier(feature_args, model_args=model_args, plan=plan.features, tensor_ranks=ranks)
    axes.pre_fully_shard_apply(model)
    if head is not None:
        head.vocabulary = split_vocabulary(model)
    features.pre_fully_shard_apply(model)  # what is computed again are the split layers
    if pipeline is not None:
        towers = _build_stages(pipeline, outline, plan)
    if outline.kind.returns_views:
        expect_views()
    axes.fully_shard_apply(model)
    axes.post_fully_shard_apply(model)
    features.post_fully_shard_apply(model)
    return AppliedPlan(model, head, towers, axes.context, axes.media, pipeline)


def fill(
    applied: AppliedPlan,
    model_args: ModelArguments,
    training: TrainingArguments,
    parallel: ParallelArguments,
    device: torch.device,
    *,
    weights: Path | None,
    load_weights: bool,
) -> LoadReport:
    """Give a sharded model its values.

    Args:
        applied: The model.
        model_args: Name the folder of its weights.
        training: Adapters, the seed, and what a folder may lack.
        parallel: Whether parameters stay on the host.
        device: Where it computes.
        weights: Folder of weights other than `model.model_name_or_path` (`training.load` with a Hugging Face folder).
        load_weights: False leaves the parameters without values: a checkpoint will fill them.

    Raises:
        ModelFolderError: Weights are missing, left over or of another shape.
    """
    model = applied.model
    parameter_device = device
    if parallel.fsdp_plan.cpu_offload:
        parameter_device = torch.device("cpu")
    if not load_weights and not training.lora.enable:  # a checkpoint of adapters holds nothing else
        materialize(model, parameter_device, device)
        loaded = LoadReport()
    else:
        loaded = ModelHub.load_weights(
            model,
            model_args,
            folder=weights,
            seed=training.seed,
            device=parameter_device,
            buffer_device=device,
            allow_missing=_allowed(training, training.allow_missing),
            allow_unexpected=_allowed(training, training.allow_unexpected),
            from_first_rank=training.load_rank0_and_broadcast,
        )
        if training.lora.enable:
            initialize_lora(model, training.lora, training.seed, fresh=load_weights, folder=loaded.folder)
    if applied.pipeline is not None:
        applied.pipeline.equalise()
    return loaded


def _allowed(training: TrainingArguments, patterns: Sequence[str]) -> Sequence[str]:
    """Patterns of what a folder may lack, or hold beside the model."""
    if training.load_strict:
        return patterns
    return EVERYTHING


def _build_stages(pipeline: Pipeline, outline: Outline, plan: ModelPlan) -> IdleTowers | None:
    """Make the stages; returns the hooks of their towers, which only the first stage has."""
    media = [tower.key for tower in plan.idle.towers]
    pipeline.build_stages(media, casts_inputs=outline.kind.casts_inputs, router_numbers=plan.router_numbers)
    if not plan.idle:
        return None
    first = pipeline.first_model
    if first is None:
        return IdleTowers(outline.model, plan.idle, runs=False)
    return IdleTowers(first, plan.idle)
