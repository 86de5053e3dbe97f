"""Puts the engine together out of the model, its objective and the `training` section; says how the learning rate of a
run jumps that is resumed with another length or another schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.json_file import JsonMapping
from mindspeed_mm.fsdp.checkpoint.loop_state import LoopState
from mindspeed_mm.fsdp.distributed.sharding.fully_shard import gathered_before
from mindspeed_mm.fsdp.distributed.torch_parallelize import set_gradient_sync
from mindspeed_mm.fsdp.loss.objectives import Objective
from mindspeed_mm.fsdp.optimizer.adamw import ShardedAdamW
from mindspeed_mm.fsdp.optimizer.build import kind_of
from mindspeed_mm.fsdp.optimizer.clip_grad import NormAverage
from mindspeed_mm.fsdp.optimizer.ema import Ema, MovingReference, OldPolicy
from mindspeed_mm.fsdp.optimizer.loss_scale import LossScale
from mindspeed_mm.fsdp.optimizer.schedules import Schedule
from mindspeed_mm.fsdp.params.argument import Arguments, FeatureArguments, ParallelArguments, PosttrainArguments
from mindspeed_mm.fsdp.params.rules.distillation import trains_critic
from mindspeed_mm.fsdp.params.rules.posttrain import draws_samples, has_moving_reference
from mindspeed_mm.fsdp.params.training_args import TrainingArguments
from mindspeed_mm.fsdp.train.assemble import Assembled
from mindspeed_mm.fsdp.train.run.data import RunLoader
from mindspeed_mm.fsdp.train.run.job import Job
from mindspeed_mm.fsdp.train.run.random_state import restore_rng, seed_everything
from mindspeed_mm.fsdp.train.step.forward_backward import (
    ForwardBackward,
    PlainForwardBackward,
    PregatheredForwardBackward,
)
from mindspeed_mm.fsdp.train.train_engine import TrainEngine


def build_average(model: nn.Module, training: TrainingArguments, posttrain: PosttrainArguments) -> Ema | None:
    """The copy of what is trained that follows it: an average of the weights, the policy that draws samples, or the one
    that it is compared with."""
    if has_moving_reference(posttrain):
        kept = 1 - posttrain.reference.mixup_alpha
        return MovingReference(model, posttrain.reference.sync_steps, lambda _step: kept)
    decay = posttrain.nft.old_decay
    if posttrain.method != "nft" or decay == 0:
        if training.ema.enable:
            return Ema(model, training.ema)
        return None
    from mindspeed_mm.fsdp.loss.flow_objectives import old_policy_decay  # a plain run starts without it

    steps_of_rollout = posttrain.grpo.steps_per_generation * posttrain.grpo.num_iterations
    if decay == "linear":
        return OldPolicy(model, steps_of_rollout, old_policy_decay)
    return OldPolicy(model, steps_of_rollout, lambda _step: float(decay))


def build_engine(
    arguments: Arguments,
    job: Job,
    assembled: Assembled,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    ema: Ema | None,
    loader: RunLoader,
    total_steps: int,
    stop_after: int | None = None,
) -> TrainEngine:
    """The engine at step 0.

    Args:
        arguments: The whole configuration.
        job: This rank.
        assembled: The model.
        objective: What it is trained for.
        optimizer: Over its trainable parameters.
        ema: The average of its weights, where one is kept.
        loader: The training data.
        total_steps: Optimizer steps of the whole run.
        stop_after: Stop after this many steps of this start.
    """
    decay = arguments.training.clip_grad_ema_decay
    return TrainEngine(
        model=assembled.model,
        objective=objective,
        forward_backward=build_forward_backward(arguments, job, assembled, objective, total_steps),
        optimizer=optimizer,
        schedule=build_lr_schedule(arguments.training, total_steps),
        training=arguments.training,
        device=job.device,
        loader=loader,
        data_group=job.data_group,
        all_ranks=dist.group.WORLD if job.world_size > 1 else None,
        counts_samples=job.state.is_first_of_its_samples,
        context=assembled.applied.context,
        critic=assembled.critic,
        pipeline=assembled.applied.pipeline,
        towers=assembled.applied.towers,
        ema=ema,
        stop_after=stop_after,
        rank=job.rank,
        phase=job.phase,
        autopsy=partial(_memory_report, arguments, job.world_size, job.device.type),
        meter=assembled.utilisation.meter,
        loss_scale=build_loss_scale(arguments.parallel, arguments.training),
        norm_average=None if decay is None else NormAverage(decay),
        late=job.device.type != "cpu"
        and not why_steps_wait(arguments.parallel, arguments.training, arguments.posttrain, optimizer, ema, job.device),
    )


def _memory_report(
    arguments: Arguments, world_size: int, device_type: str, batch: Batch
) -> tuple[list[str], list[str]]:
    from mindspeed_mm.fsdp.train.memory.advice import memory_report  # when memory has run out, and not at every start

    return memory_report(arguments, world_size, device_type, batch)


def why_steps_wait(
    parallel: ParallelArguments,
    training: TrainingArguments,
    posttrain: PosttrainArguments,
    optimizer: torch.optim.Optimizer,
    ema: Ema | None,
    device: torch.device,
) -> str:
    """Why the host must know the numbers of each step before it goes on, for which it waits on an accelerator; empty
    where it need not.

    Args:
        arguments: The whole configuration.
        optimizer: Over the trainable parameters.
        ema: The average of the weights, where one is kept.
        device: Where steps are computed.
    """
    if not (isinstance(optimizer, ShardedAdamW) and optimizer.can_leave_out_on(device)):
        return f"{kind_of(optimizer)} as it is configured cannot leave out an update on the device"
    if build_loss_scale(parallel, training) is not None:
        return "the next step needs its loss scale"
    if trains_critic(posttrain):
        return "the critic is trained in front of each update"
    if draws_samples(posttrain) or (ema is not None and not ema.is_result):
        return "the next step needs a policy that follows it"
    return ""


def continue_from(engine: TrainEngine, state: LoopState, training: TrainingArguments, job: Job) -> None:
    """Give the engine, and this rank's random numbers, the state in which a checkpoint was saved."""
    engine.load_state(state)
    if engine.critic is not None:
        engine.critic.steps = engine.iteration
    rng = state.get("rng")
    if rng is not None and not training.no_load_rng:
        restore_rng(rng)
    else:
        seed_everything(training.seed, job.state.random_rank, engine.iteration)


def build_forward_backward(
    arguments: Arguments, job: Job, assembled: Assembled, objective: Objective, total_steps: int
) -> ForwardBackward:
    """How a step's micro-batches go through the model under this plan, and through the critic of a distillation."""
    forward_backward = _forward_backward_of_plan(arguments.parallel, arguments.features, job, assembled, objective)
    if (critic := assembled.critic) is None:
        return forward_backward
    from mindspeed_mm.fsdp.train.distillation.critic import DistillationForwardBackward
    from mindspeed_mm.fsdp.train.distillation.critic_start import critic_start
    from mindspeed_mm.fsdp.train.distillation.objective import DistillationObjective

    assert isinstance(objective, DistillationObjective)
    schedule = build_lr_schedule(critic_start(arguments).training, total_steps)
    updates = arguments.posttrain.dmd.dfake_gen_update_ratio
    return DistillationForwardBackward(forward_backward, assembled.model, critic, objective, schedule, updates)


def _forward_backward_of_plan(
    parallel: ParallelArguments, features: FeatureArguments, job: Job, assembled: Assembled, objective: Objective
) -> ForwardBackward:
    if assembled.applied.pipeline is not None:
        from mindspeed_mm.fsdp.train.step.pipeline import PipelineForwardBackward  # torch's schedules are 4 MB

        return PipelineForwardBackward(assembled.applied.pipeline, objective, parallel.pp_plan, job.device)
    sync: Callable[[nn.Module, bool], None] = set_gradient_sync
    if features.enable_gradient_offload:  # the host adds gradients up that are summed over ranks already
        sync = _sync_always
    plain = PlainForwardBackward(assembled.model, objective, sync)
    if parallel.fsdp_plan.pregather:
        return PregatheredForwardBackward(plain, assembled.model, gathered_before)
    return plain


def _sync_always(_model: nn.Module, _enabled: bool) -> None:
    """In the place of `set_gradient_sync`: every backward pass communicates its gradients."""


def build_lr_schedule(training: TrainingArguments, total_steps: int) -> Schedule:
    """The learning-rate schedule of a `training` section."""
    warmup_steps = training.lr_warmup_ratio * total_steps
    if not training.lr_warmup_from_start or math.isclose(warmup_steps, round(warmup_steps)):
        warmup_steps = round(warmup_steps)
    return Schedule(
        style=training.lr_decay_style,
        lr=training.lr,
        lr_min=training.lr_min,
        lr_start=training.lr_start,
        warmup_steps=warmup_steps,
        decay_ratio=training.lr_decay_ratio,
        total_steps=total_steps,
        wsd_style=training.lr_wsd_style,
        warms_from_start=training.lr_warmup_from_start,
    )


def build_loss_scale(parallel: ParallelArguments, training: TrainingArguments) -> LossScale | None:
    """The scale that gradients in fp16 need; None for other types."""
    plan = parallel.fsdp_plan
    if "fp16" not in (plan.param_dtype, plan.reduce_dtype):
        return None
    return LossScale(training.initial_loss_scale, training.loss_scale_window, training.min_loss_scale)


# --- another length or schedule ---------------------------------------------------------------------------------------

TOTAL_STEPS = "total_steps"
"""In the context of a checkpoint: the length of the run that saved it."""


def jump_of_rate(context: JsonMapping, iteration: int, schedule: Schedule, training: TrainingArguments) -> str:
    """From which to which learning rate a resumed run goes, where its next step would have had another one.

    Args:
        context: Of the checkpoint, which holds the configuration that saved it.
        iteration: Steps done.
        schedule: From here on.
        training: The `training` section now.

    Returns:
        A sentence, whose rates have as many digits as tell them apart; empty where the schedule goes on as it was, or
        that is not known.
    """
    then = (context.get("config") or {}).get("training") or {}
    total = context.get(TOTAL_STEPS) or (None if then.get("train_epochs") else then.get("train_iters"))
    if not isinstance(total, int) or iteration < 1:
        return ""
    old = {key: value for key, value in then.items() if key.startswith("lr") and key != "lr_scaling_plan"}
    before = build_lr_schedule(training.model_copy(update=old), total)
    if math.isclose(before.at(iteration), schedule.at(iteration), rel_tol=1e-9, abs_tol=0.0):
        return ""
    why = "the schedule has changed"
    if total != schedule.total_steps:
        why = f"the run is {schedule.total_steps:,} steps long, no longer {total:,}"
    last, due, now = before.at(iteration - 1), before.at(iteration), schedule.at(iteration)
    if math.isclose(last, now, rel_tol=1e-3):  # no jump: the rates part from here on
        here, there = _told_apart(now, due)
        return f"{why}: the learning rate of step {iteration + 1} is {here}, not {there}"
    start, end = _told_apart(last, now)
    return f"{why}: the learning rate jumps from {start} at step {iteration} to {end} at step {iteration + 1}"


def _told_apart(one: float, other: float) -> tuple[str, str]:
    """Two different numbers with so many digits, three at least, that their texts differ."""
    digits = next(count for count in range(3, 18) if f"{one:.{count}g}" != f"{other:.{count}g}")
    return f"{one:.{digits}g}", f"{other:.{digits}g}"
