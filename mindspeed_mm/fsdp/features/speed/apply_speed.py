"""Applies to a built model what makes it faster on one device, before anything is split: kernels of attention-like
layers, products of patches, fused operators, linear layers in 8 bits. Compiling comes later, around what is computed
again.
"""

from __future__ import annotations

from torch import nn

from mindspeed_mm.fsdp.features.speed.choice import SpeedFacts, choose_compile, choose_fused
from mindspeed_mm.fsdp.features.speed.fused_kernels import apply_fused_kernels
from mindspeed_mm.fsdp.features.speed.low_precision import LowPrecision, apply_low_precision
from mindspeed_mm.fsdp.features.speed.tower_operators import apply_tower_operators
from mindspeed_mm.fsdp.models.behaviour.attention import check_attention_trains
from mindspeed_mm.fsdp.models.behaviour.kernels import KernelsGivenUp, choose_kernels
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.ops.patch_products import multiply_patches
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.params.training_args import TrainingArguments


def apply_speed(
    model: nn.Module,
    model_args: ModelArguments,
    features: FeatureArguments,
    training: TrainingArguments,
    facts: SpeedFacts,
) -> None:
    """All steps, in order; each raises `ConfigError` or `MachineError` for what it cannot do here."""
    check_attention_trains(model_args.attn_implementation)
    choose_kernels(model, model_args)
    multiply_patches(model)
    wish, compiled = features.fused_kernels, features.compile == "auto" and choose_compile("auto", facts).what
    apply_fused_kernels(model, choose_fused(wish, facts, blocks_compiled=bool(compiled)), is_wish=wish is True)
    if wish is not False:
        has_norm_kernel = facts.machine.device_type == "cuda" and not facts.keeps_rounding
        apply_tower_operators(model, norms=has_norm_kernel)
    apply_low_precision(model, training.quantization_plan)


def describe_speed(model: nn.Module) -> dict[str, str]:
    """What was done beside fused kernels, by a word for the log; nothing where nothing was."""
    facts = facts_of(model)
    done = {
        "8 bits": facts.noted(LowPrecision),
        "kernels": facts.noted(KernelsGivenUp),
    }
    return {word: str(what) for word, what in done.items() if what is not None}
