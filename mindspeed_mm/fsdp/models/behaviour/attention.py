"""Which attention a model is built with: the kernel that `ops.attention_kernels` answers for what the model needs, or
the one that the configuration names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.ops.attention import ATTENTION_NAME
from mindspeed_mm.fsdp.ops.attention_kernels import (
    BY_NAME,
    EAGER,
    FA2,
    OF_PACKAGES,
    Device,
    Kernel,
    Need,
    choose_kernel,
)
from mindspeed_mm.fsdp.ops.context_attention.language import CONTEXT_ATTENTION_NAME
from mindspeed_mm.fsdp.ops.kernels_in_force import IN_FORCE, device_facts
from mindspeed_mm.fsdp.utils.device import get_device_type
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, has_all

_KEY = "model.attn_implementation"
_ALIASES = {"flex": "flex_attention"}
_FA2 = "flash_attention_2"
_HALF = (torch.bfloat16, torch.float16)
_BACKENDS = {"sdpa": "native", "eager": "_native_math", _FA2: "flash", "flex_attention": "flex"}
"""Our names → those of diffusers' attention dispatcher."""
_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")


class AttentionChoice(NamedTuple):
    """What a model computes attention by, and why."""

    name: str
    """As transformers knows it."""
    reason: str
    """Empty where there was nothing to choose."""
    install: str = ""
    """What would bring a faster kernel; empty where nothing would."""
    need: Need | None = None
    """What the kernels below that name are asked for; None where the name says it all."""
    device: Device = Device("cpu")
    """Where they are chosen."""

    def kernel(self, *asks: str) -> str:
        """The kernel below the name, for calls that ask for something more; empty where it is what torch finds."""
        if self.need is None:
            return ""
        kernel = choose_kernel(replace(self.need, asks=(*self.need.asks, *asks)), self.device).kernel
        if kernel.devices and kernel.name != self.name:
            return kernel.name
        return ""


def choose_attention(
    requested: str | None,
    model_class: object = None,
    *,
    config: object = None,
    param_dtype: torch.dtype | None = None,
) -> AttentionChoice:
    """The name to hand to transformers, with the reason: the one asked for, or the best that runs here. The kernel
    below it is put into force.

    A kernel that no CPU can run gives way to the best that one can, so that one file trains on a laptop and on a
    cluster; the reason says so.

    Args:
        requested: `model.attn_implementation`.
        model_class: Says what it supports (`_supports_sdpa`, `_supports_flex_attn`); anything when None. One that
            `needs_own_attention` gets ours for `sdpa`, which transformers lets do less.
        config: Of the model: widths of heads, dropout, capped scores.
        param_dtype: What the model computes in.

    Raises:
        MachineError: This device does not run the kernel asked for, or its package is not installed.
        ConfigError: The kernel asked for does not do what the model needs.
    """
    need = need_of(config, param_dtype)
    asked, choice = _resolve(requested, need)
    if asked in (EAGER, "flex_attention", _FA2):
        return choice
    if attribute_at(model_class, "needs_own_attention", False) and choice.name == "sdpa":
        return choice._replace(name=ATTENTION_NAME)
    if not attribute_at(model_class, "_supports_sdpa", True):
        return AttentionChoice(EAGER, "the model takes nothing else")
    if choice.name == "flex_attention" and not attribute_at(model_class, "_supports_flex_attn", False):
        return choice._replace(name=EAGER, need=None)
    if choice.name in (EAGER, "flex_attention") or asked:
        return choice
    # The same kernels to the bit, but right-padded batches need no dense mask, and packed rows are exact.
    has_interface = attribute_at(model_class, "_supports_attention_backend", False)
    return choice._replace(name=ATTENTION_NAME if has_interface else "sdpa")


def set_attention_backend(model: nn.Module, requested: str | None, *, param_dtype: torch.dtype | None = None) -> None:
    """Let a model of diffusers compute attention by a kernel: the one asked for, or the best that runs here.

    It is set on this model's attention layers alone: diffusers' `set_attention_backend` also changes the default of
    every model that is built later in the process.

    Args:
        model: Of diffusers.
        requested: `model.attn_implementation`.
        param_dtype: What the model computes in.

    Raises:
        MachineError: This device does not run the kernel asked for, or its package is not installed.
        ConfigError: diffusers has no such kernel, or it does not compute in `param_dtype`.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName  # seconds to import

    _, choice = _resolve(requested, need_of(attribute_at(model, "config"), param_dtype))
    if choice.name not in _BACKENDS:
        raise ConfigError(
            f"'{choice.name}' is not an attention kernel of image and video generators",
            key=_KEY,
            way_out=f"Choose one of {', '.join((*_BACKENDS, *OF_PACKAGES[1:]))}, or leave it out.",
        )
    for module in model.modules():
        processor = attribute_at(module, "processor")
        if has_all(processor, "_attention_backend"):
            processor._attention_backend = AttentionBackendName(_BACKENDS[choice.name])
    facts_of(model).attention = choice


def need_of(config: object, param_dtype: torch.dtype | None) -> Need:
    """What a model asks of kernels, by its configuration and those of its parts."""
    asks = [] if param_dtype in _HALF else ["fp32"]
    width = 0
    for part in _parts(config):
        if any(attribute_at(part, name, 0) for name in _DROPOUTS):
            asks.append("dropout")
        if attribute_at(part, "attn_logit_softcapping"):
            asks.append("softcap")
        found = _width_of(part)
        if attribute_at(part, "v_head_dim") not in (None, 0, found):
            asks.append("two widths")
        width = max(width, found)
    return Need(tuple(dict.fromkeys(asks)), width)


def _parts(config: object) -> Iterator[object]:
    """The configuration, or those of its layers where they differ (Gemma 4), and those of its parts."""
    if attribute_at(config, "is_heterogeneous", False):
        yield from attribute_at(config, "per_layer_config")
    else:
        yield config
    for name in attribute_at(config, "sub_configs", {}):
        part = attribute_at(config, name)
        if part is not None:
            yield from _parts(part)


def _width_of(config: object) -> int:
    """Width of a head; 0 where the configuration does not say."""
    latent = attribute_at(config, "qk_nope_head_dim")
    if latent:
        return int(latent) + int(attribute_at(config, "qk_rope_head_dim", 0))
    for name in ("head_dim", "attention_head_dim"):
        width = attribute_at(config, name)
        if isinstance(width, int):
            return width
    size, heads = attribute_at(config, "hidden_size"), attribute_at(config, "num_attention_heads")
    if isinstance(size, int) and isinstance(heads, int) and heads:
        return size // heads
    return 0


def attention_name(model: nn.Module) -> str:
    """What a built model computes attention by, in the words of `model.attn_implementation`, the kernel below it, and
    why it was taken."""
    choice = facts_of(model).attention
    # The configuration says what a model of transformers computes by now: packing may have changed it.
    name = str(attribute_at(model, "config._attn_implementation") or "")
    if choice is None:
        return name or "the model's own"
    name = name or choice.name
    if name == CONTEXT_ATTENTION_NAME:
        kernel = choice.kernel("lse")
        if kernel:
            return f"{name} by {kernel}"
        return name
    by, rows = choice.kernel(), choice.kernel("packed")
    if name == ATTENTION_NAME and rows != by:
        by = f"{by or 'sdpa'}, packed rows by {rows or 'sdpa'}"
    text = f"{name} by {by}" if by else name
    if choice.reason and name == choice.name:
        return f"{text} ({choice.reason})"
    return text


def check_attention_trains(requested: str | None) -> None:
    """Raise `MachineError` for a kernel without a backward pass here."""
    if _ALIASES.get(requested or "", requested) == "flex_attention" and get_device_type() == "cpu":
        raise MachineError("'flex' has no backward pass on a CPU", key=_KEY, way_out="Take 'sdpa', or leave it out.")


def _resolve(requested: str | None, need: Need) -> tuple[str, AttentionChoice]:
    """What is asked for, empty where a CPU cannot run it or nothing is; and what is taken, put into force."""
    asked, reason, device = _ALIASES.get(requested or "", requested or ""), "", device_facts()
    if asked in OF_PACKAGES and device.kind == "cpu":
        asked, reason = "", f"'{asked}' does not run on a CPU"
    if asked == _FA2:
        _check_fa2(need, device)
    if asked in (_FA2, EAGER, "flex_attention"):
        return asked, AttentionChoice(asked, "as configured")
    asked_for = BY_NAME.get(asked)
    if asked_for is not None:
        device = _device_with(asked_for, need, device)
    device = IN_FORCE.serve(need, device)
    if asked_for is not None and asked_for.lacks_package(device):
        raise _cannot_be_had(asked_for, asked_for.lacks_package(device))
    kernel, why, install = choose_kernel(need, device)
    name = kernel.name if kernel.name in (EAGER, "flex_attention") else "sdpa"
    if asked:
        reason, name = "as configured", name if asked in OF_PACKAGES else asked
    choice = AttentionChoice(name, reason or why, install, need, device)
    return "" if asked in OF_PACKAGES else asked, choice


def _device_with(kernel: Kernel, need: Need, device: Device) -> Device:
    """The device as if it had no package but that of the kernel asked for.

    Raises:
        MachineError: The device does not run it, or its package is not installed.
        ConfigError: The model needs what it does not do.
    """
    lacks = kernel.lacks_device(device) or kernel.lacks_package(device)
    if lacks:
        raise _cannot_be_had(kernel, lacks)
    refuses = kernel.refuses(need)
    if refuses:
        raise ConfigError(f"'{kernel.name}' {refuses}", key=_KEY, way_out=_way_out(need))
    name = kernel.package.distribution if kernel.package else ""
    return replace(device, installed={each: device.installed[each] for each in device.installed if each == name})


def _cannot_be_had(kernel: Kernel, why: str) -> MachineError:
    return MachineError(f"'{kernel.name}' cannot be had: {why}", key=_KEY, way_out="Leave it out: the best is taken.")


def _check_fa2(need: Need, device: Device) -> None:
    """Raise `MachineError` where the package is not installed on CUDA, `ConfigError` for another type than bf16 and
    fp16."""
    if device.kind == "cuda" and FA2 not in device.installed:
        raise MachineError(
            f"'{_FA2}' needs the package {FA2}, which is not installed",
            key=_KEY,
            way_out="Install it, or leave the key out: torch brings the same kernel.",
        )
    if "fp32" in need.asks:
        raise ConfigError(f"'{_FA2}' computes in bf16 or fp16 only", key=_KEY, way_out=_way_out(need))


def _way_out(need: Need) -> str:
    if "fp32" in need.asks:
        return "Set parallel.fsdp_plan.param_dtype: bf16, or leave it out."
    return "Leave it out."
