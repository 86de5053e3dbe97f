"""The one order in which a model is put together. Each step relies on those above it.

Adapters → quantised linears → tied groups are read → pipeline split → hooks that must see full modules → tensor,
expert, context → compile → recompute → offload → slices of rows → stages → `fully_shard`, children before the root →
prefetch order → weights, straight into the shards → first values of adapters → ends that share a weight over stages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.fsdp.distributed.context.apply import ContextParallel, context_problems, find_decoder
from mindspeed_mm.fsdp.distributed.expert.plan import ExpertPlan, balance_copies
from mindspeed_mm.fsdp.distributed.parallel_state import get_parallel_state
from mindspeed_mm.fsdp.distributed.pipeline.apply import Pipeline, check_units, split_into_stages
from mindspeed_mm.fsdp.distributed.sharding.fully_shard import expect_views
from mindspeed_mm.fsdp.distributed.tensor.plan import TensorPlan
from mindspeed_mm.fsdp.distributed.tensor.vocabulary import split_vocabulary
from mindspeed_mm.fsdp.distributed.torch_parallelize import ParallelApplier
from mindspeed_mm.fsdp.distributed.towers.idle import IdleTowers
from mindspeed_mm.fsdp.distributed.towers.media import MediaSharing
from mindspeed_mm.fsdp.features.apply_features import FeaturesApplier
from mindspeed_mm.fsdp.features.speed.apply_speed import apply_speed
from mindspeed_mm.fsdp.loss.build_head_loss import build_head_loss
from mindspeed_mm.fsdp.loss.head_loss import HeadLoss
from mindspeed_mm.fsdp.loss.router_aux import leave_router_loss_to_us
from mindspeed_mm.fsdp.models.behaviour.attention import attention_name
from mindspeed_mm.fsdp.models.behaviour.experts import choose_experts
from mindspeed_mm.fsdp.models.behaviour.packed_rows import apply_packed_rows
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.materialize import materialize
from mindspeed_mm.fsdp.models.lora.apply import LoraReport, apply_lora, initialize_lora
from mindspeed_mm.fsdp.models.modelhub import LoadReport, ModelHub
from mindspeed_mm.fsdp.models.structure.spec import ModelSpec, resolve_spec
from mindspeed_mm.fsdp.models.vocabulary import check_processor
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.fsdp.train.run.utilisation import Utilisation
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter

EVERYTHING = ("*",)
"""The pattern of all names."""


@dataclass(frozen=True)
class Assembled:
    """A model ready to train."""

    model: nn.Module
    spec: ModelSpec
    head: HeadLoss | None
    towers: IdleTowers | None
    loaded: LoadReport
    tensor_plan: TensorPlan | None = None
    """How layers are split over ranks."""
    context: ContextParallel | None = None
    """How sequences are spread over ranks."""
    experts: ExpertPlan | None = None
    """How experts are spread over ranks."""
    pipeline: Pipeline | None = None
    """How layers are spread over ranks; `model` is then this rank's part."""
    media: MediaSharing | None = None
    """How towers share media."""
    warnings: tuple[str, ...] = ()
    """Sentences for the user about what the plan costs."""
    utilisation: Utilisation | None = None
    """What the log says of FLOPs."""

    @property
    def adapter(self) -> DiffusionAdapter | None:
        """The family's adapter when the model is a generator."""
        return facts_of(self.model).adapter

    @property
    def lora(self) -> LoraReport | None:
        """The adapters that are trained."""
        return facts_of(self.model).lora

    @property
    def attention(self) -> str:
        """Name of the attention implementation, for the log."""
        return attention_name(self.model)


def assemble(
    arguments: Arguments,
    device: torch.device,
    *,
    weights: Path | None = None,
    load_weights: bool = True,
    packs: bool = False,
    given: nn.Module | None = None,
    processor: Any = None,
) -> Assembled:
    """Build, shard and load the model that the configuration names.

    Args:
        arguments: The whole configuration.
        device: Where the parameters live.
        weights: Folder of weights other than `model.model_name_or_path` (`training.load` with a Hugging Face folder).
        load_weights: False leaves the parameters without values: a checkpoint will fill them.
        packs: Prepare the model for packed rows even where the configuration asks for none.
        given: A model with its values, to be trained in place of what `model` names.
        processor: What makes the rows, to be compared with the model.

    Raises:
        ConfigError: A pattern of the plan matches nothing.
        ModelFolderError: Weights are missing, left over or of another shape; rows are made for another model.
    """
    model = build_model(arguments, given)
    check_processor(model, processor)
    if packs or packs_rows(arguments):
        apply_packed_rows(model, attention=arguments.model.attn_implementation)
    spec = resolve_spec(model)
    utilisation = Utilisation.of(model, arguments)
    is_cut = arguments.parallel.pipeline_parallel_size > 1
    pipeline = split_into_stages(model, arguments.parallel, get_parallel_state()) if is_cut else None

    # Both hooks read full hidden states and modules by their own names: they stand before sharding.
    head = build_head_loss(model, spec.head, arguments.features)
    towers = IdleTowers(model, spec.towers) if spec.towers and pipeline is None else None

    plans = build_plans(arguments, spec, pipeline, is_generator=is_generator(model))
    towers_of_media = {tower.module for tower in spec.towers}
    features = FeaturesApplier(arguments.features, spec.blocks, model_args=arguments.model, towers=towers_of_media)
    plans.pre_fully_shard_apply(model)
    if head is not None:
        head.vocabulary = split_vocabulary(model)
    check_plans(model, arguments, plans, features, pipeline)
    features.pre_fully_shard_apply(model)  # what is computed again are the split layers
    if pipeline is not None:
        towers = build_stages(pipeline, spec, model)
    if is_generator(model):
        expect_views()
    plans.fully_shard_apply(model)
    plans.post_fully_shard_apply(model)
    features.post_fully_shard_apply(model)

    loaded = fill(model, arguments, device, weights=weights, load_weights=load_weights)
    if given is not None:
        loaded = replace(loaded, folder="")
    if pipeline is not None:
        pipeline.equalise()
    model.train()
    return Assembled(
        model,
        spec,
        head,
        towers,
        loaded,
        plans.tensor_plan,
        plans.context,
        plans.experts,
        pipeline,
        plans.media,
        tuple(plans.warnings),
        utilisation,
    )


def build_model(arguments: Arguments, given: nn.Module | None = None) -> nn.Module:
    """The model on one device, without values unless it is given, with its adapters and the experts that the
    configuration chooses."""
    param_dtype = torch_dtype(arguments.parallel.fsdp_plan.param_dtype)
    if given is not None:
        model = ModelHub.adopt(given, arguments.model, param_dtype=param_dtype)
    else:
        model = ModelHub.build(arguments.model, param_dtype=param_dtype, feature_args=arguments.features)
    if arguments.training.lora.enable:
        apply_lora(model, arguments.training.lora, param_dtype=param_dtype)
    apply_speed(model, arguments)
    leave_router_loss_to_us(model)
    grouped, skip_padding = arguments.model.use_grouped_expert_matmul, arguments.features.skip_moe_pad_tokens
    choose_experts(model, grouped=grouped, skip_padding=skip_padding)
    return model


def packs_rows(arguments: Arguments) -> bool:
    """Whether samples share rows; data sets of generators and of plugins may not know the key."""
    return getattr(arguments.data.dataset_param.basic_parameters, "packs", False)


def is_generator(model: nn.Module) -> bool:
    """Whether a model bears the adapter of a family of generators."""
    return facts_of(model).adapter is not None


def build_plans(
    arguments: Arguments, spec: ModelSpec, pipeline: Pipeline | None, *, is_generator: bool
) -> ParallelApplier:
    """The applier of the `parallel` section to a model of this specification."""
    return ParallelApplier(
        parallel_for(arguments.parallel, is_generator=is_generator),
        shard_modules=spec.shard_modules,
        tie_groups=spec.tie_groups,
        towers={tower.module for tower in spec.towers},
        gather_logits=arguments.features.loss_cfg.loss_type == "raw",
        expert_copies=balance_copies(arguments.features, arguments.parallel),
        pipeline=pipeline,
    )


def check_plans(
    model: nn.Module,
    arguments: Arguments,
    plans: ParallelApplier,
    features: FeaturesApplier,
    pipeline: Pipeline | None,
) -> None:
    """Raise `ConfigError` for a plan that a model cannot do with the other sections as they are."""
    if plans.context is not None and not is_generator(model):
        check_spread_sequences(model, arguments)
    if pipeline is not None:
        for key, names in features.modules_by_key(pipeline.share.whole).items():
            check_units(names, pipeline.plan, key)


def fill(
    model: nn.Module, arguments: Arguments, device: torch.device, *, weights: Path | None, load_weights: bool
) -> LoadReport:
    """Give a sharded model its values; arguments as of `assemble`."""
    training = arguments.training
    parameter_device = torch.device("cpu") if arguments.parallel.fsdp_plan.cpu_offload else device
    if not load_weights and not training.lora.enable:  # a checkpoint of adapters holds nothing else
        materialize(model, parameter_device, device)
        return LoadReport()
    loaded = ModelHub.load_weights(
        model,
        arguments.model,
        folder=weights,
        seed=training.seed,
        device=parameter_device,
        buffer_device=device,
        allow_missing=training.allow_missing if training.load_strict else EVERYTHING,
        allow_unexpected=training.allow_unexpected if training.load_strict else EVERYTHING,
        from_first_rank=training.load_rank0_and_broadcast,
    )
    if training.lora.enable:
        initialize_lora(model, training.lora, training.seed, fresh=load_weights, folder=loaded.folder)
    return loaded


def build_stages(pipeline: Pipeline, spec: ModelSpec, model: nn.Module) -> IdleTowers | None:
    """Make the stages; returns the hooks of their towers, which only the first stage has."""
    pipeline.build_stages([tower.key for tower in spec.towers], casts_inputs=not is_generator(model))
    if not spec.towers:
        return None
    first = pipeline.first_model
    return IdleTowers(first if first is not None else model, spec.towers, runs=first is not None)


def check_spread_sequences(model: nn.Module, arguments: Arguments) -> None:
    """Raise `ConfigError` for what a language model cannot do with sequences spread over ranks."""
    problems = context_problems(find_decoder(model).config)
    if arguments.features.loss_cfg.loss_type == "raw":
        problems.append(
            Problem(
                "'raw' is the model's own loss, which needs the whole sequence on every rank",
                key="features.loss_cfg.loss_type",
                way_out="Leave it out.",
            )
        )
    if problems:
        raise ConfigError(f"{type(model).__name__} cannot spread a sequence over ranks", problems=problems)


def parallel_for(parallel: ParallelArguments, *, is_generator: bool) -> ParallelArguments:
    """The plan as it is applied.

    A generator gets its inputs in their right types: cast by `fully_shard` all together, timesteps and rotary tables
    would be rounded to bf16, which tells 999 from 1000 no more. A stage stays gathered for the length of a step:
    several micro-batches are under way in it.
    """
    changes: dict[str, bool] = {"cast_forward_inputs": False} if is_generator else {}
    if parallel.pipeline_parallel_size > 1:
        changes["reshard_after_forward"] = False
    return parallel.model_copy(update={"fsdp_plan": parallel.fsdp_plan.model_copy(update=changes)})
