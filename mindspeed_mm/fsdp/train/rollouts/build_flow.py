"""Builds what draws the samples of a generator that learns from rewards."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.model_kinds import GENERATOR
from mindspeed_mm.fsdp.data.datasets.generation_prompts.prompt_dataset import PromptDataset
from mindspeed_mm.fsdp.loss.flow_objectives import RewardObjective
from mindspeed_mm.fsdp.models.diffusion.velocity import Denoiser
from mindspeed_mm.fsdp.models.lora.switch import adapters_off
from mindspeed_mm.fsdp.optimizer.ema import MovingReference, OldPolicy
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.rules.posttrain import has_moving_reference, reference_kind
from mindspeed_mm.fsdp.train.assemble import Assembled
from mindspeed_mm.fsdp.train.reference import assemble_reference, check_same_inputs, check_start
from mindspeed_mm.fsdp.train.rollouts.build import rewards_with_servers
from mindspeed_mm.fsdp.train.rollouts.flow import FlowRollouts
from mindspeed_mm.fsdp.train.rollouts.flow_model import FlowModel, Switch
from mindspeed_mm.fsdp.train.run.data import RunData
from mindspeed_mm.fsdp.train.run.job import Job
from mindspeed_mm.fsdp.train.train_engine import move

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def build_flow_rollouts(
    arguments: Arguments,
    assembled: Assembled,
    job: Job,
    data: RunData,
    objective: RewardObjective,
    *,
    denoise: Denoiser,
    encoders: DiffusionPipeline,
) -> FlowRollouts:
    """What draws and judges samples of a generator; an `OldPolicy` draws them where there is one."""
    prompts = data.train.origin
    assert isinstance(prompts, PromptDataset)  # see `check_prompts`
    context = assembled.applied.context

    def own(batch: Batch) -> Batch:
        return move(batch if context is None else context.split(batch), job.device)

    reference = generator_reference(arguments, assembled, job.device)
    draws_by_older = isinstance(assembled.average, OldPolicy) and not isinstance(assembled.average, MovingReference)
    old: Switch = assembled.average.applied if draws_by_older and assembled.average else nullcontext
    return FlowRollouts(
        FlowModel(assembled.model, denoise, encoders, own, job.device, reference, old),
        objective,
        arguments.posttrain,
        rewards_with_servers(arguments, GENERATOR, job.device),
        size=prompts.size,
        seed=arguments.training.seed,
        micro_batch_size=arguments.training.micro_batch_size,
        shift=arguments.training.diffusion.shift,
    )


def generator_reference(arguments: Arguments, assembled: Assembled, device: torch.device) -> Switch | None:
    """What makes the model the one that training started from; None where nothing is compared with it.

    Raises:
        ConfigError: It cannot be had.
    """
    match reference_kind(arguments):
        case "adapters_off":
            check_start(arguments)
            return lambda: adapters_off(assembled.model)
        case "frozen" if assembled.average is not None and has_moving_reference(arguments.posttrain):
            return assembled.average.applied
        case "frozen":
            second = assemble_reference(arguments, device).model
            check_same_inputs(assembled.model, second, arguments.posttrain.reference.model_name_or_path)
            return lambda: nullcontext(second)
    return None
