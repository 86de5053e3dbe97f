"""What the keys `model.skip_*_recompute` mean for a model: under full recomputation, results of attention, gated
delta-net and Kimi delta-attention kernels are kept, and all else is computed again.

An attention kernel is one operation of torch, whose result is kept by its name. A delta net is many operations, or a
kernel that torch does not see: the layer keeps what it returned, and the activations that it saved.
"""

from __future__ import annotations

import inspect

from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.features.memory.kept_results import (
    ATTENTION,
    SELECTIVE,
    Contexts,
    KeptForward,
    keep_calls_of,
    keep_results,
)
from mindspeed_mm.fsdp.params.feature_args import RecomputePlan
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.utils.model_parts import attribute_at

SKIP_ATTENTION = "model.skip_flash_attn_recompute"
DELTA_NETS = {
    "model.skip_gdn_recompute": (("gated_delta_rule",), "gated delta nets"),
    "model.skip_kda_recompute": (("kimi_delta_attention", "kda"), "Kimi delta attention"),
}
"""Key → parts of names of functions that such a layer calls, and what people call the layer."""


def apply_kept_results(model: nn.Module, plan: RecomputePlan, keys: ModelArguments) -> Contexts | None:
    """Let layers keep what they return, in place; the result is what recomputed modules run under.

    Args:
        model: Not sharded yet; one rank's part of it where it is cut into stages.
        plan: Of recomputation, which is on.
        keys: The `model` section.

    Raises:
        ConfigError: See `check_skipped_kernels`.
    """
    if keys.skip_flash_attn_recompute:
        check_attention(model)
    asked = _delta_nets_asked_for(keys)
    for key in asked:
        for layer in find_delta_nets(model, key):
            if not isinstance(layer.forward, KeptForward):
                keep_calls_of(layer, key)
    operations = frozenset[str]()
    if plan.mode == "selective":
        operations = SELECTIVE
    elif keys.skip_flash_attn_recompute:
        operations = ATTENTION
    return keep_results(operations, calls=bool(asked))


def check_skipped_kernels(model: nn.Module, keys: ModelArguments) -> None:
    """Raise `ConfigError` for a key that the whole model has no layers for, or whose results cannot be kept."""
    if keys.skip_flash_attn_recompute:
        check_attention(model)
    for key in _delta_nets_asked_for(keys):
        if not find_delta_nets(model, key):
            _, layers = DELTA_NETS[key]
            raise ConfigError(
                f"true, but {type(model).__name__} has no layers of {layers}", key=key, way_out="Leave it out."
            )


def _delta_nets_asked_for(keys: ModelArguments) -> list[str]:
    asked = {"model.skip_gdn_recompute": keys.skip_gdn_recompute, "model.skip_kda_recompute": keys.skip_kda_recompute}
    return [key for key in DELTA_NETS if asked[key]]


def check_attention(model: nn.Module) -> None:
    """Raise `ConfigError` unless attention is a kernel that computes the same twice."""
    if attribute_at(model, "config._attn_implementation") == "eager":
        raise ConfigError(
            "true, but attention is computed by 'eager', which has no kernel whose result could be kept",
            key=SKIP_ATTENTION,
            way_out="Leave model.attn_implementation out, or this key.",
        )
    for name, module in model.named_modules():
        chance = attribute_at(module, "attention_dropout", 0.0)
        if isinstance(chance, float) and chance > 0:
            raise ConfigError(
                f"true, but '{name}' has a dropout of {chance} in its attention, whose random numbers are to be drawn "
                "again",
                key=SKIP_ATTENTION,
                way_out="Leave it out, or set attention_dropout to 0 in the model's config.json.",
            )


def find_delta_nets(model: nn.Module, key: str) -> list[nn.Module]:
    """Layers that call the kernel that a key is about."""
    parts, _ = DELTA_NETS[key]
    found = []
    for module in model.modules():
        names = " ".join(attribute_at(inspect.unwrap(type(module).forward), "__code__.co_names", ()))
        if any(part in names for part in parts):
            found.append(module)
    return found
