"""Rules between the optimizer's keys and the rest of the configuration."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_mm.core.errors import Problem
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.training_args import OPTIMIZERS


def optimizer_problems(arguments: Arguments) -> Iterator[Problem]:
    """What an optimizer, its states and offloaded gradients cannot go with."""
    yield from _on_the_host_already(arguments)
    yield from _half_precision(arguments)
    training, offloads = arguments.training, arguments.features.enable_gradient_offload
    if offloads and arguments.parallel.pipeline_parallel_size > 1:
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
    if training.optimizer_state_dtype and not optimizer.keeps_two_moments:
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


def _half_precision(arguments: Arguments) -> Iterator[Problem]:
    training = arguments.training
    if training.min_loss_scale > training.initial_loss_scale:
        yield Problem(
            f"{training.min_loss_scale:g} is above training.initial_loss_scale, {training.initial_loss_scale:g}",
            key="training.min_loss_scale",
            way_out="Lower it.",
        )
    if training.quantization_plan is not None and arguments.parallel.fsdp_plan.param_dtype == "fp16":
        yield Problem(
            "fp16, but the products of training.quantization_plan are computed from bf16",
            key="parallel.fsdp_plan.param_dtype",
            way_out="Set bf16.",
        )


def _on_the_host_already(arguments: Arguments) -> Iterator[Problem]:
    if not arguments.parallel.fsdp_plan.cpu_offload:
        return
    already = "parallel.fsdp_plan.cpu_offload keeps parameters, gradients and optimizer on the host already"
    name = arguments.training.optimizer
    if OPTIMIZERS[name].moments_on_host:
        yield Problem(f"{name}, but {already}", key="training.optimizer", way_out="Set adamw.")
    if arguments.features.enable_gradient_offload:
        yield Problem(f"true, but {already}", key="features.enable_gradient_offload", way_out="Set it to false.")
