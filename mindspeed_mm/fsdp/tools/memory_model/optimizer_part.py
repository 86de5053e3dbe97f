"""What an optimizer keeps from step to step, and what it takes for the length of its own step."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from mindspeed_mm.fsdp.optimizer.streaming import MOST_BYTES
from mindspeed_mm.fsdp.params.training_args import TrainingArguments
from mindspeed_mm.fsdp.tools.memory_model.static_part import HeldParameter

FP32_BYTES = 4
_INT8_BLOCK = 256
"""Numbers that share a scale."""
_INT8_LEAST = 4096
"""Smaller parameters keep fp32 moments."""


def state_bytes(parameter: HeldParameter, training: TrainingArguments, matrices: Collection[str]) -> int:
    """The optimizer's state of a parameter, on whichever side it lies.

    Args:
        parameter: A trained one.
        training: The section.
        matrices: Names of the parameters that Muon takes: one moment instead of two.
    """
    moments = 1 if parameter.name in matrices else 2
    if training.optimizer_state_dtype == "bf16":
        return moments * parameter.numel * 2
    if training.optimizer_state_dtype == "int8" and parameter.numel >= _INT8_LEAST:
        return moments * (parameter.numel + -(-parameter.numel // _INT8_BLOCK) * FP32_BYTES)
    return moments * parameter.bytes


def step_bytes(trained: Iterable[HeldParameter], training: TrainingArguments, device_type: str) -> int:
    """What the optimizer's step takes on the device for itself, all of it freed again."""
    held = list(trained)
    numel = sum(parameter.numel for parameter in held)
    if training.optimizer_state_dtype:  # a bucket at a time is unpacked: two moments in fp32
        a_number = 16 if training.optimizer_state_dtype == "bf16" else 48
        return min(numel, MOST_BYTES // a_number) * 2 * FP32_BYTES
    if training.optimizer == "adamw_swap":  # two buckets at a time are on the device
        return min(2 * MOST_BYTES, 2 * numel * FP32_BYTES)
    if training.optimizer == "adamw" and not training.adam_fused and device_type != "cpu":
        return sum(parameter.bytes for parameter in held)  # multi-tensor kernels: the root of all second moments
    return 0
