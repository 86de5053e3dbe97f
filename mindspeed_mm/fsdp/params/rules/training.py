"""Rules between keys of training: the optimizer, the loss, evaluation, and the tools that record steps."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_mm.core.errors import Problem
from mindspeed_mm.fsdp.params.argument import (
    DataArguments,
    FeatureArguments,
    ParallelArguments,
    ToolsArguments,
    TrainingArguments,
)
from mindspeed_mm.fsdp.params.evaluate_args import METRIC_NAMES
from mindspeed_mm.fsdp.params.training_args import OPTIMIZERS


def optimizer_problems(
    parallel: ParallelArguments, training: TrainingArguments, features: FeatureArguments
) -> Iterator[Problem]:
    """What an optimizer, its states and offloaded gradients cannot go with."""
    yield from _on_the_host_already(parallel, training, features)
    yield from _half_precision(parallel, training)
    offloads = features.enable_gradient_offload
    if offloads and parallel.pipeline_parallel_size > 1:
        yield Problem(
            "true is not supported with pipeline stages: their schedule sums gradients once, at its end",
            key="features.enable_gradient_offload",
            way_out="Set it to false, or parallel.pipeline_parallel_size to 1.",
        )
    if training.clip_grad_ema_decay is not None and not training.clip_grad:
        yield Problem(
            f"{training.clip_grad_ema_decay:g}, but training.clip_grad is 0, which switches clipping off",
            key="training.clip_grad_ema_decay",
            way_out="Leave it out, or set clip_grad above 0: it bounds the first step.",
        )
    optimizer = OPTIMIZERS[training.optimizer]
    if training.optimizer_state_dtype and optimizer.moments != 2:
        yield Problem(
            f"{training.optimizer_state_dtype} is for AdamW; {training.optimizer} keeps one state where AdamW keeps "
            "two",
            key="training.optimizer_state_dtype",
            way_out="Leave it out, or set training.optimizer to adamw or adamw_swap.",
        )
    if optimizer.for_matrices and training.lora.enable and not training.lora.modules_to_save:
        yield Problem(
            f"{training.optimizer} has no matrix to train: AdamW updates the factors of adapters",
            key="training.optimizer",
            way_out="Set adamw, or name modules to train fully in training.lora.modules_to_save.",
        )


def _half_precision(parallel: ParallelArguments, training: TrainingArguments) -> Iterator[Problem]:
    if training.min_loss_scale > training.initial_loss_scale:
        yield Problem(
            f"{training.min_loss_scale:g} is above training.initial_loss_scale, {training.initial_loss_scale:g}",
            key="training.min_loss_scale",
            way_out="Lower it.",
        )
    if training.quantization_plan is not None and parallel.fsdp_plan.param_dtype == "fp16":
        yield Problem(
            "fp16, but the products of training.quantization_plan are computed from bf16",
            key="parallel.fsdp_plan.param_dtype",
            way_out="Set bf16.",
        )


def _on_the_host_already(
    parallel: ParallelArguments, training: TrainingArguments, features: FeatureArguments
) -> Iterator[Problem]:
    if not parallel.fsdp_plan.cpu_offload:
        return
    already = "parallel.fsdp_plan.cpu_offload keeps parameters, gradients and optimizer on the host already"
    name = training.optimizer
    if OPTIMIZERS[name].moments_on_host:
        yield Problem(f"{name}, but {already}", key="training.optimizer", way_out="Set adamw.")
    if features.enable_gradient_offload:
        yield Problem(f"true, but {already}", key="features.enable_gradient_offload", way_out="Set it to false.")


# --- loss -------------------------------------------------------------------------------------------------------------

_CHUNKED = ("features.enable_chunk_loss", "features.enable_dynamic_chunk_loss")
_Z_LOSS, _OFFLOAD = "features.loss_cfg.z_loss_coef", "features.loss_cfg.router_aux_loss_offload"


def loss_problems(data: DataArguments, parallel: ParallelArguments, features: FeatureArguments) -> Iterator[Problem]:
    """Every rule that the loss breaks."""
    loss = features.loss_cfg
    asked = (features.enable_chunk_loss is True, features.enable_dynamic_chunk_loss)
    chunked = [key for key, is_set in zip(_CHUNKED, asked, strict=True) if is_set]
    if loss.loss_type == "raw":
        without_effect = list(chunked)
        if loss.z_loss_coef:
            without_effect.append(_Z_LOSS)
        for key in without_effect:
            yield Problem(
                "applies to the engine's loss, but features.loss_cfg.loss_type is raw: the model's own loss",
                key=key,
                way_out="Leave one of them out.",
            )
    basic = data.dataset_param.basic_parameters
    if loss.loss_type == "per_micro_batch_loss" and (basic.packing or basic.neat_packing):
        yield Problem(
            "'per_micro_batch_loss' would depend on which samples are packed together",
            key="features.loss_cfg.loss_type",
            way_out="Set it to per_token_loss, or data.dataset_param.basic_parameters.packing to false.",
        )
    output_dtype = parallel.fsdp_plan.output_dtype
    if chunked and output_dtype not in (None, "fp32"):
        yield Problem(
            f"{output_dtype} would round the loss, which is what the model returns under {chunked[0]}",
            key="parallel.fsdp_plan.output_dtype",
            way_out="Leave it out.",
        )
    if loss.router_aux_loss_offload and not loss.router_aux_loss_coef:
        yield Problem(
            "true, but there is no router loss: features.loss_cfg.router_aux_loss_coef is 0",
            key=_OFFLOAD,
            way_out="Leave it out, or set a coefficient.",
        )


# --- evaluation -------------------------------------------------------------------------------------------------------

SECTION = "training.evaluate"


def evaluation_fits(parallel: ParallelArguments, training: TrainingArguments) -> Iterator[Problem]:
    """What contradicts itself in `training.evaluate`, or cannot be had under the plan."""
    asked = training.evaluate
    if asked.interval and asked.data is None:
        yield Problem(
            f"{asked.interval}, but there are no questions to answer",
            key=f"{SECTION}.interval",
            way_out=f"Name a file of rows with answers: {SECTION}.data.",
        )
    stages = parallel.pipeline_parallel_size
    if asked.interval and stages > 1:
        yield Problem(
            f"is not possible together with parallel.pipeline_parallel_size: {stages}: no rank can gather the model",
            key=f"{SECTION}.interval",
            way_out="Leave it out, and compare runs by training.val_interval; mm evaluate scores a checkpoint, "
            "also over ranks (--plan).",
        )
    yield from _best_can_be_measured(training)


def _best_can_be_measured(training: TrainingArguments) -> Iterator[Problem]:
    asked, key = training.evaluate, f"{SECTION}.best_metric"
    if asked.best_metric is None:
        for name in ("patience", "min_delta"):
            if getattr(asked, name):
                way_out = f"Name the metric, e.g. {key}=val_loss."
                yield Problem("is given, but no metric that it is about", key=f"{SECTION}.{name}", way_out=way_out)
        return
    if not training.save:
        yield Problem(
            "is given, but there is no run folder to keep the best checkpoint in", key=key, way_out="Set training.save."
        )
    name = asked.best_metric.partition("/")[0]
    if name.startswith("val_"):
        if not training.val_interval:
            way_out = "Set training.val_interval, and name rows for validation."
            what = f"'{asked.best_metric}' is measured by validation, and there is none"
            yield Problem(what, key=key, way_out=way_out)
    elif name != METRIC_NAMES[asked.metric]:
        yield Problem(
            f"'{asked.best_metric}' is not a number that this run measures",
            key=key,
            way_out=f"Choose val_loss, or with metric: {asked.metric} {METRIC_NAMES[asked.metric]}.",
        )
    elif not asked.interval:
        yield Problem(
            f"'{asked.best_metric}' is measured by evaluation, and there is none",
            key=key,
            way_out=f"Set {SECTION}.interval and {SECTION}.data.",
        )


# --- tools ------------------------------------------------------------------------------------------------------------


def tools_problems(tools: ToolsArguments) -> Iterator[Problem]:
    """Profilers that could record nothing."""
    profile, memory = tools.profile, tools.memory_profile
    if profile.enable:
        yield from _rank_problems(profile.ranks, "tools.profile.ranks")
        if profile.profile_type == "dynamic" and profile.dynamic_param.config_path is None:
            yield Problem(
                "is not given, but a dynamic profile is requested by a file in it",
                key="tools.profile.dynamic_param.config_path",
                way_out="Name a folder; it is created if it does not exist.",
            )
        static = profile.static_param
        if profile.profile_type == "static":
            yield from _step_problems(static.start_step, static.end_step, "tools.profile.static_param")
    if memory.enable:
        yield from _rank_problems(memory.dump_ranks, "tools.memory_profile.dump_ranks")
        yield from _step_problems(memory.start_step, memory.end_step, "tools.memory_profile")


def _rank_problems(ranks: tuple[int, ...], key: str) -> Iterator[Problem]:
    if not ranks or (ranks != (-1,) and min(ranks) < 0):
        yield Problem(f"{list(ranks)} names no ranks", key=key, way_out="List ranks, counted from 0, or [-1] for all.")


def _step_problems(start: int, end: int, section: str) -> Iterator[Problem]:
    """The first step of a run is 1."""
    if end <= max(1, start):
        yield Problem(f"is not after start_step, {max(1, start)}", key=f"{section}.end_step", way_out="Raise it.")
