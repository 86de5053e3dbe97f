"""Rules between the keys of `posttrain.dmd` and of what it goes together with; how many micro-batches a step takes."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_mm.core.errors import Problem
from mindspeed_mm.fsdp.params.argument import (
    Arguments,
    DataArguments,
    FeatureArguments,
    ModelArguments,
    ParallelArguments,
    TrainingArguments,
)
from mindspeed_mm.fsdp.params.posttrain_args import PosttrainArguments
from mindspeed_mm.fsdp.params.training_args import OPTIMIZERS

_KEY = "posttrain.dmd"
_BLOCK_KEYS = ("same_step_across_blocks", "context_noise")
"""Keys of `posttrain.dmd` that act on blocks of frames alone."""


def trains_critic(posttrain: PosttrainArguments) -> bool:
    """Whether a critic is trained beside the student."""
    return posttrain.method == "dmd" and posttrain.dmd.objective == "distribution_matching"


def reads_trajectories(posttrain: PosttrainArguments) -> bool:
    """Whether the student learns from trajectories of its teacher that were stored."""
    return posttrain.method == "dmd" and posttrain.dmd.objective == "ode_regression"


def micro_batches_of_step(training: TrainingArguments, posttrain: PosttrainArguments) -> int:
    """Micro-batches that a rank takes from the data in an optimizer step: with `dmd`, those of the critic's updates,
    too."""
    accumulation = training.gradient_accumulation_steps
    if not trains_critic(posttrain):
        return accumulation
    return accumulation * (posttrain.dmd.dfake_gen_update_ratio + 1)


def has_held_out(data: DataArguments) -> bool:
    """Whether the configuration names rows that are not trained on."""
    basic = data.dataset_param.basic_parameters
    return (data.val_dataset_param, basic.val_dataset, basic.val_rate or None) != (None, None, None)


def distillation_problems(arguments: Arguments) -> Iterator[Problem]:
    """What `posttrain.method: dmd` cannot do as the configuration stands."""
    yield from _of_levels(arguments.posttrain)
    yield from _of_the_critic(arguments.posttrain, arguments.training)
    yield from _of_training(arguments.model, arguments.data, arguments.training)
    yield from _of_the_plan(arguments.parallel, arguments.features, arguments.posttrain)
    if arguments.posttrain.reference.sync_steps:
        yield Problem(
            f"{arguments.posttrain.reference.sync_steps}, but a teacher does not follow its student",
            key="posttrain.reference.sync_steps",
            way_out="Leave it out.",
        )


def _of_levels(posttrain: PosttrainArguments) -> Iterator[Problem]:
    dmd = posttrain.dmd
    low, high = dmd.score_range
    if not 0 < low < high < 1:
        yield Problem(
            f"[{low:g}, {high:g}] is not a range of noise levels within 0 and 1",
            key=f"{_KEY}.score_range",
            way_out="Give two numbers, the smaller one first, e.g. [0.02, 0.98].",
        )
    if dmd.negative_prompt and dmd.guidance_scale == 1:
        yield Problem(
            f"'{dmd.negative_prompt:.80}' has no effect: posttrain.dmd.guidance_scale is 1, which is no guidance",
            key=f"{_KEY}.negative_prompt",
            way_out="Leave it out, or set another guidance_scale.",
        )
    if dmd.num_frame_per_block is None:
        for name in _BLOCK_KEYS:
            if dmd[name] != type(dmd).model_fields[name].default:
                yield Problem(
                    f"{dmd[name]} has no effect: posttrain.dmd.num_frame_per_block is null",
                    key=f"{_KEY}.{name}",
                    way_out="Leave it out, or set num_frame_per_block.",
                )


def _of_the_critic(posttrain: PosttrainArguments, training: TrainingArguments) -> Iterator[Problem]:
    """Betas stand in the place of the student's, which not every optimizer reads."""
    of_student = {"beta1_critic": "adam_beta1", "beta2_critic": "adam_beta2"}
    for name, own in of_student.items():
        readers = [each for each, facts in OPTIMIZERS.items() if own in facts.reads]
        if posttrain.dmd[name] is not None and training.optimizer not in readers:
            yield Problem(
                f"{posttrain.dmd[name]:g} has no effect with training.optimizer: {training.optimizer}",
                key=f"{_KEY}.{name}",
                way_out=f"Leave it out, or use {' or '.join(readers)}.",
            )


def _of_training(model: ModelArguments, data: DataArguments, training: TrainingArguments) -> Iterator[Problem]:
    diffusion = training.diffusion
    own: dict[str, object] = {
        "caption_dropout": diffusion.caption_dropout or None,
        "prior_loss_weight": diffusion.prior_loss_weight,
        "sigma_range": diffusion.sigma_range,
        "snr_gamma": diffusion.snr_gamma,
        "timestep_density": diffusion.timestep_density,
        "loss_weighting": diffusion.loss_weighting if diffusion.loss_weighting != "none" else None,
    }
    for name, value in own.items():
        if value is not None:
            yield Problem(
                f"{value} is for supervised training, and posttrain.method: dmd has its own losses",
                key=f"training.diffusion.{name}",
                way_out="Leave it out.",
            )
    if model.train_from_scratch:
        yield Problem(
            "true, but a student and its critic start from a model that draws",
            key="model.train_from_scratch",
            way_out="Set it to false, and name the teacher's folder or a student's.",
        )
    if training.val_interval and has_held_out(data):
        yield Problem(
            "held-out rows are measured by a loss on them, and posttrain.method: dmd trains on the student's samples",
            key="training.val_interval",
            way_out="Set it to 0; training.sampling shows samples while training.",
        )


def _of_the_plan(
    parallel: ParallelArguments, features: FeatureArguments, posttrain: PosttrainArguments
) -> Iterator[Problem]:
    plan = parallel.fsdp_plan
    spread = ("pipeline_parallel_size", "tensor_parallel_size", "ulysses_parallel_size", "ring_attention_size")
    for name in spread:
        if (size := parallel[name]) > 1:
            yield Problem(
                f"{size}, but posttrain.method: dmd spreads its three models by parallel.fully_shard_parallel_size "
                "alone",
                key=f"parallel.{name}",
                way_out="Set it to 1.",
            )
    if "fp16" in (plan.param_dtype, plan.reduce_dtype):
        yield Problem(
            "fp16 needs a loss scale, and posttrain.method: dmd trains two models",
            key="parallel.fsdp_plan.param_dtype",
            way_out="Set it to bf16 or fp32.",
        )
    if features.enable_gradient_offload:
        yield Problem(
            "true, but posttrain.method: dmd clips the gradients of two models on their device",
            key="features.enable_gradient_offload",
            way_out="Leave it out.",
        )
    if posttrain.dmd.num_frame_per_block is not None and features.compile is True:
        yield Problem(
            "true, but blocks of frames see a growing number of frames, for each of which graphs would be compiled",
            key="features.compile",
            way_out="Leave it out, or leave posttrain.dmd.num_frame_per_block out.",
        )
