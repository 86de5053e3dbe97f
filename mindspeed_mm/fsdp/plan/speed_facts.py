"""What a configuration says that `auto` of fused kernels and compiled blocks is decided by, and what was chosen."""

from __future__ import annotations

from torch import nn

from mindspeed_mm.fsdp.features.feature_plan import FeaturePlan
from mindspeed_mm.fsdp.features.speed.choice import Machine, SpeedFacts
from mindspeed_mm.fsdp.features.speed.fused_kernels import FusedKernels
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.params.argument import Arguments, ParallelArguments, PosttrainArguments, TrainingArguments
from mindspeed_mm.fsdp.params.rules.posttrain import draws_samples
from mindspeed_mm.fsdp.params.run_length import run_length


def speed_facts(arguments: Arguments, machine: Machine | None = None, *, trains: bool = True) -> SpeedFacts:
    """The facts of a run; pure where the machine is given.

    Args:
        arguments: The whole configuration.
        machine: Where it runs; None: this one.
        trains: False for a model that is only compared with.
    """
    keeps_blocks = "the model is compared with, not trained"
    if trains:
        keeps_blocks = _keeps_blocks(arguments)
    return SpeedFacts(
        machine or Machine.here(),
        run_length(arguments.model, arguments.training).steps,
        keeps_rounding=_keeps_rounding(arguments.parallel),
        compiles_nothing=_compiles_nothing(arguments.training, arguments.posttrain),
        keeps_blocks=keeps_blocks,
    )


def describe_choices(model: nn.Module, features: FeaturePlan) -> list[str]:
    """A line each for fused kernels and compiled blocks: who makes them and why, or why nobody does, and what
    installing would give.

    Args:
        model: Outlined, whole.
        features: Resolved for it.
    """
    fused = facts_of(model).noted(FusedKernels)
    lines = []
    if fused is not None:
        lines.append(f"fused kernels: {fused}")
    compiled = str(features.compiler)
    if features.compiled:
        compiled = f"{len(features.compiled)} by {compiled}"
    return [*lines, f"compiled blocks: {compiled}"]


def _keeps_rounding(parallel: ParallelArguments) -> str:
    if parallel.fsdp_plan.param_dtype == "fp64":
        return "kernels round fp64 to fp32"
    return ""


def _compiles_nothing(training: TrainingArguments, posttrain: PosttrainArguments) -> str:
    if training.use_deter_comp:
        return "training.use_deter_comp wants the same bits twice, and a compiler chooses kernels by timing them"
    if draws_samples(posttrain):
        return "answers are drawn token by token, where calling a compiled function takes longer than what it computes"
    return ""


def _keeps_blocks(arguments: Arguments) -> str:
    """Why blocks are not compiled where nobody asks for it: what cannot be compiled, and what no test of ours runs
    compiled."""
    features, model, training = arguments.features, arguments.model, arguments.training
    plan, parallel = features.recompute_plan, arguments.parallel
    selective = features.recompute and plan.mode == "selective"
    reasons = {
        f"posttrain.method {arguments.posttrain.method} compares passes with and without gradients, which must round "
        "alike": arguments.posttrain.method is not None,
        "model.skip_gdn_recompute or skip_kda_recompute leaves a layer out of the block": features.recompute
        and (model.skip_gdn_recompute or model.skip_kda_recompute),
        "features.enable_weight_offload brings weights within blocks that keep results": features.enable_weight_offload
        and (selective or (features.recompute and model.skip_flash_attn_recompute)),
        "features.recompute_plan.use_reentrant runs blocks without gradients first": features.recompute
        and plan.use_reentrant,
        "model.attn_implementation flex compiles itself": model.attn_implementation in ("flex", "flex_attention"),
        f"training.lora.quantize {training.lora.quantize} keeps weights in a format of its own": training.lora.enable
        and training.lora.quantize is not None,
        "parallel.pp_plan.schedule zbv cuts a block's backward pass in two": parallel.pipeline_parallel_size > 1
        and parallel.pp_plan.schedule == "zbv",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
