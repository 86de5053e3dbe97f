"""Decides what a configuration does to a model, in the one order in which it will be done.

Adapters and quantised linears, fused kernels, experts and packed rows are in the outline already; tied groups are read
off it. Then, each step relying on those above it:

pipeline split → the head's loss and towers without input hook in, as they must see full modules → tensor, expert,
context → towers with a layout of their own → compile (innermost) → weights on the host → recompute → offload → slices
of rows → stages → `fully_shard`, children before the root → prefetch order → weights, straight into the shards → first
values of adapters → ends that share a weight over stages → optimizer.

`apply.py` carries it out. Nothing is changed here and nothing is read from a device: what is refused is refused
before a weight is read, all at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from mindspeed_mm.core.errors import CollectedErrors, ConfigError, Problem
from mindspeed_mm.core.model_kinds import GENERATOR, LANGUAGE, UNIFIED
from mindspeed_mm.core.patterns import is_inside
from mindspeed_mm.fsdp.distributed.expert.plan import balance_copies, cut_dim
from mindspeed_mm.fsdp.distributed.parallel_plan import ModelLayout, ParallelPlan, resolve_parallel_plan
from mindspeed_mm.fsdp.distributed.pipeline.plan import check_units
from mindspeed_mm.fsdp.distributed.tensor.plan import CUT_DIMS
from mindspeed_mm.fsdp.distributed.towers.idle import MUST_AGREE, IdlePlan
from mindspeed_mm.fsdp.features.feature_plan import FeaturePlan, distribute_inputs, resolve_features
from mindspeed_mm.fsdp.features.memory.weight_offload import frozen_weights
from mindspeed_mm.fsdp.features.speed.low_precision import LowPrecision
from mindspeed_mm.fsdp.loss.build_head_loss import HeadPlan, resolve_head
from mindspeed_mm.fsdp.loss.method_checks import (
    check_distilled_generator,
    check_generator_settings,
    check_method,
    check_paired_generator,
    check_rewarded_generator,
)
from mindspeed_mm.fsdp.loss.objectives import (
    check_generator_loss,
    check_loss_type,
    check_no_picture_weights,
    is_models_own,
)
from mindspeed_mm.fsdp.loss.router_aux import check_routers, router_numbers
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.optimizer.groups import GroupPlan, resolve_groups
from mindspeed_mm.fsdp.optimizer.state_formats import check_packages, check_rows
from mindspeed_mm.fsdp.params.argument import Arguments, TrainingArguments
from mindspeed_mm.fsdp.params.sizes.parallel import ParallelSizes, least_sizes
from mindspeed_mm.fsdp.plan.model_plan import ModelPlan
from mindspeed_mm.fsdp.plan.outline import Outline
from mindspeed_mm.fsdp.plan.speed_facts import speed_facts

HEADLINE = "the model cannot be trained as the configuration says"


def resolve_plan(
    outline: Outline,
    arguments: Arguments,
    sizes: ParallelSizes | None = None,
    *,
    trains: bool = True,
    errors: CollectedErrors | None = None,
) -> ModelPlan:
    """The plan of a model. Neither the model nor the process is changed.

    Args:
        outline: The model, whole.
        arguments: The whole configuration.
        sizes: Of the parallel groups; None: the number of ranks is not known. The plan is that of the fewest that fit,
            and what depends on the number of data ranks is not judged.
        trains: False for a model that is only compared with: there is nothing to optimise.
        errors: What was found against the model before; it is raised with what is found here.

    Raises:
        ConfigError: With every problem.
        MachineError: The installed libraries cannot do what is asked for.
    """
    errors = errors or CollectedErrors()
    model, spec = outline.model, outline.spec
    ranks_known = sizes is not None
    sizes = sizes or least_sizes(arguments.parallel)
    features = errors.attempt(
        resolve_features,
        model,
        arguments.features,
        spec.blocks,
        model_args=arguments.model,
        towers=outline.towers,
        speed=speed_facts(arguments, trains=trains),
    )
    copies = errors.attempt(balance_copies, arguments.features, arguments.parallel)
    on_host: tuple[str, ...] = ()
    if features is not None:
        on_host = tuple(frozen_weights(model, features.waiting))
    layout = ModelLayout(
        spec.shard_modules,
        spec.tie_groups,
        outline.towers,
        gathers_logits=is_models_own(arguments.features.loss_cfg.loss_type, has_head=bool(spec.head)),
        expert_copies=copies or 0,
        on_host=on_host,
    )
    parallel = errors.attempt(resolve_parallel_plan, model, arguments.parallel, sizes, layout, ranks_known=ranks_known)
    groups: GroupPlan | None = GroupPlan({})
    if trains:
        groups = errors.attempt(resolve_groups, model, arguments.training)
        errors.attempt(check_packages, arguments.training.optimizer_state_dtype)
    head = errors.attempt(_resolve_loss, outline, arguments)
    if parallel is not None and features is not None:
        errors.attempt(_check_stages, parallel, features)
        if features.recomputed and parallel.tensor is not None:
            alike = parallel.called_alike(spec.blocks)
            features = errors.attempt(distribute_inputs, features, arguments.features, arguments.parallel, model, alike)
        if trains:
            errors.attempt(_check_state_rows, model, arguments.training, parallel)
    errors.raise_all(HEADLINE)
    assert parallel is not None and features is not None and groups is not None
    must_agree: tuple[str, ...] = ()
    if sizes.dp > 1:  # a rank on its own need not agree with others about media
        must_agree = tuple(spec.media_without_towers)
    idle = IdlePlan(tuple(spec.towers), must_agree)
    if idle.must_agree:
        parallel = replace(parallel, warnings=(*parallel.warnings, _must_agree(model, idle.must_agree)))
    if low := facts_of(model).noted(LowPrecision):
        parallel = replace(parallel, warnings=(*parallel.warnings, *low.warnings))
    numbers = 0
    if parallel.stages is not None and arguments.features.loss_cfg.router_aux_loss_coef:
        numbers = router_numbers(model)
    return ModelPlan(parallel, features, groups, tuple(spec.blocks), head, idle, numbers)


def _must_agree(model: nn.Module, keys: Sequence[str]) -> str:
    media = ", ".join(keys)
    return (
        f"{type(model).__name__}: no placeholder input is known for {media}: every rank must have some, or none, in "
        f"each step; other steps are refused. {MUST_AGREE}"
    )


def _resolve_loss(outline: Outline, arguments: Arguments) -> HeadPlan | None:
    """What is minimised can be computed from this model's outputs, under this plan."""
    errors = CollectedErrors()
    # In a shorter format the loss, which is what the model returns then, would be rounded.
    may_slice = arguments.parallel.fsdp_plan.output_dtype in (None, "fp32")
    head = errors.attempt(resolve_head, outline.model, outline.spec.head, arguments.features, may_slice=may_slice)
    LOSS_CHECKS[outline.kind](outline, arguments, errors)
    if outline.kind is not UNIFIED:
        errors.attempt(check_no_picture_weights, arguments.features.loss_cfg)
    if method := arguments.posttrain.method:
        errors.attempt(check_method, method, outline.kind, outline.model, has_head=bool(outline.spec.head))
    errors.raise_all("the loss does not fit the model")
    return head


def _check_token_loss(outline: Outline, arguments: Arguments, errors: CollectedErrors) -> None:
    model, loss_cfg, parallel = outline.model, arguments.features.loss_cfg, arguments.parallel
    errors.attempt(check_loss_type, loss_cfg.loss_type, model, has_head=bool(outline.spec.head))
    if loss_cfg.router_aux_loss_coef:
        errors.attempt(check_routers, model)
    spreads_sequences = parallel.ring_attention_size * parallel.ulysses_parallel_size > 1
    if spreads_sequences and is_models_own(loss_cfg.loss_type, has_head=bool(outline.spec.head)):
        errors.attempt(_refuse_own_loss, model, has_head=bool(outline.spec.head))


def _check_denoising(outline: Outline, arguments: Arguments, errors: CollectedErrors) -> None:
    from mindspeed_mm.fsdp.loss.denoising import check_path_settings  # a run of a language model starts without it

    errors.attempt(check_generator_loss, arguments.features.loss_cfg)
    adapter = facts_of(outline.model).adapter
    assert adapter is not None
    errors.attempt(check_path_settings, adapter.noise_path, arguments.training.diffusion)
    if arguments.posttrain.method == "dpo":
        errors.attempt(check_paired_generator, adapter, outline.model)
    elif arguments.posttrain.method == "dmd":
        kind = arguments.data.dataset_param.dataset_type
        errors.attempt(check_distilled_generator, arguments.posttrain.dmd, adapter, outline.model, kind)
    elif method := arguments.posttrain.method:
        errors.attempt(check_rewarded_generator, method, adapter, outline.model)
        errors.attempt(check_generator_settings, arguments.posttrain.grpo)


def _check_both_losses(outline: Outline, arguments: Arguments, errors: CollectedErrors) -> None:
    from mindspeed_mm.fsdp.loss.denoised_pictures import check_unified_loss  # a run of a language model starts without

    errors.attempt(check_unified_loss, arguments.training, arguments.features)
    _check_token_loss(outline, arguments, errors)


LOSS_CHECKS = {LANGUAGE: _check_token_loss, GENERATOR: _check_denoising, UNIFIED: _check_both_losses}
"""Kind of model → what compares the configured loss with the model."""


def _refuse_own_loss(model: nn.Module, *, has_head: bool) -> None:
    what, way_out = "'raw' is the model's own loss", "Leave it out."
    if not has_head:
        what = "a model without an output head is trained by its own loss"
        way_out = "Set parallel.ring_attention_size and parallel.ulysses_parallel_size to 1."
    problem = Problem(
        f"{what}, which needs the whole sequence on every rank", key="features.loss_cfg.loss_type", way_out=way_out
    )
    raise ConfigError(f"{type(model).__name__} cannot spread a sequence over ranks", problems=[problem])


def _check_stages(parallel: ParallelPlan, features: FeaturePlan) -> None:
    """No feature works on a module that holds the layers which stages are cut of."""
    if parallel.stages is None:
        return
    errors = CollectedErrors()
    for key, names in features.by_key().items():
        errors.attempt(check_units, names, parallel.stages, key)
    errors.raise_all("the features do not fit the stages")


def _check_state_rows(model: nn.Module, training: TrainingArguments, parallel: ParallelPlan) -> None:
    """Moments are packed along rows, which must not be cut within a block."""
    if training.optimizer_state_dtype != "int8":
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            shape = tuple(parameter.shape)
            own_width = math.ceil(shape[-1] / _row_cuts(name, shape, parallel))
            check_rows(shape, own_width)


def _row_cuts(name: str, shape: tuple[int, ...], parallel: ParallelPlan) -> int:
    """Into how many parts, one a rank, a plan cuts the rows of a parameter."""
    last, sizes = len(shape) - 1, parallel.sizes
    if parallel.tensor is not None:
        rule = parallel.tensor.cuts.get(name.rpartition(".")[0])
        if rule is not None and not rule.blocks and CUT_DIMS.get(rule.style) == last:
            return sizes.tp
    experts = parallel.experts
    if experts is not None and is_inside(name, experts.modules, strict=True):
        is_cut = cut_dim(shape, experts.sizes.ep, experts.sizes.efsdp) == last
        if is_cut:
            return experts.sizes.efsdp
        return 1
    if parallel.sharding.cut_dims.get(name) == last:
        return sizes.fsdp
    return 1
