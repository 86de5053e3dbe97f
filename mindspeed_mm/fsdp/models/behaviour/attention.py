"""Which attention kernel a model is built with."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.ops.attention import ATTENTION_NAME
from mindspeed_mm.fsdp.utils.device import get_device_type
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, has_all

_ALIASES = {"flex": "flex_attention"}
_PACKAGES = {"flash_attention_3": "flash_attn_interface", "flash_attention_2": "flash_attn"}
_HALF = (torch.bfloat16, torch.float16)
_BACKENDS = {
    "sdpa": "native",
    "eager": "_native_math",
    "flash_attention_2": "flash",
    "flash_attention_3": "_flash_3",
    "flex_attention": "flex",
}
"""Our names → those of diffusers' attention dispatcher."""


class AttentionChoice(NamedTuple):
    """A kernel, and why it was taken."""

    name: str
    reason: str
    """Empty where nothing was chosen."""


def choose_attention(
    requested: str | None, model_class: object = None, *, param_dtype: torch.dtype | None = None
) -> AttentionChoice:
    """The name to hand to transformers, with the reason: the one asked for, or the best that runs here.

    A kernel that this kind of device cannot run gives way to the best that it can, so that one file trains on a laptop
    and on a cluster; the reason says so.

    Args:
        requested: `model.attn_implementation`.
        model_class: Says what it supports (`_supports_sdpa`, `_supports_flash_attn`); anything when None.
        param_dtype: What the model computes in: flash attention takes bf16 and fp16 only.

    Raises:
        MachineError: The package of the kernel asked for is not installed.
        ConfigError: The kernel asked for does not compute in `param_dtype`.
    """
    name = _ALIASES.get(requested or "", requested or "")
    device_type = get_device_type()
    if name and not _lacks(name):
        _check_kernel(name, param_dtype)
        return AttentionChoice(name, "as configured")
    if name:
        why = _lacks(name)
    elif not attribute_at(model_class, "_supports_flash_attn", True):
        why = "the model takes no flash attention"
    elif device_type != "cuda":
        why = f"flash attention is CUDA's, this is '{device_type}'"
    elif param_dtype not in _HALF:
        why = "flash attention takes bf16 and fp16 only"
    else:
        for name, package in _PACKAGES.items():
            if importlib.util.find_spec(package) is not None:
                return AttentionChoice(name, f"{package} is installed")
        why = f"{' and '.join(_PACKAGES)} are not installed"
    if not attribute_at(model_class, "_supports_sdpa", True):
        return AttentionChoice("eager", "the model takes nothing else")
    # The same kernels to the bit, but right-padded batches need no dense mask, and packed rows are exact.
    has_interface = attribute_at(model_class, "_supports_attention_backend", False)
    return AttentionChoice(ATTENTION_NAME if has_interface else "sdpa", why)


def set_attention_backend(model: nn.Module, requested: str | None, *, param_dtype: torch.dtype | None = None) -> None:
    """Let a model of diffusers compute attention by a kernel: the one asked for, or torch's own choice.

    It is set on this model's attention layers alone: diffusers' `set_attention_backend` also changes the default of
    every model that is built later in the process.

    Args:
        model: Of diffusers.
        requested: `model.attn_implementation`.
        param_dtype: What the model computes in.

    Raises:
        MachineError: The package of the kernel asked for is not installed.
        ConfigError: diffusers has no such kernel, or it does not compute in `param_dtype`.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName  # seconds to import

    name = _ALIASES.get(requested or "sdpa", requested or "sdpa")
    why = _lacks(name)
    if why:
        name = "sdpa"
    if name not in _BACKENDS:
        raise ConfigError(
            f"'{name}' is not an attention kernel of image and video generators",
            key="model.attn_implementation",
            way_out=f"Choose one of {', '.join(_BACKENDS)}, or leave it out.",
        )
    _check_kernel(name, param_dtype)
    for module in model.modules():
        processor = attribute_at(module, "processor")
        if has_all(processor, "_attention_backend"):
            processor._attention_backend = AttentionBackendName(_BACKENDS[name])
    facts_of(model).attention = AttentionChoice(name, why)


def attention_name(model: nn.Module) -> str:
    """What a built model computes attention by, in the words of `model.attn_implementation`, and why it was taken."""
    choice = facts_of(model).attention
    # The configuration says what a model of transformers computes by now: packing may have changed it.
    name = attribute_at(model, "config._attn_implementation")
    if choice is None:
        return str(name or "the model's own")
    if name is not None and name != choice.name:
        return str(name)
    return f"{choice.name} ({choice.reason})" if choice.reason else choice.name


def check_attention_trains(requested: str | None) -> None:
    """Raise `MachineError` for a kernel without a backward pass here."""
    if _ALIASES.get(requested or "", requested) == "flex_attention" and get_device_type() == "cpu":
        raise MachineError(
            "'flex' has no backward pass on a CPU",
            key="model.attn_implementation",
            way_out="Take 'sdpa', or leave it out.",
        )


def _lacks(name: str) -> str:
    """Why no device of this kind runs a kernel; empty where it can."""
    if name in _PACKAGES and get_device_type() == "cpu":
        return f"'{name}' does not run on a CPU"
    return ""


def _check_kernel(name: str, param_dtype: torch.dtype | None) -> None:
    """Raise `MachineError` for a kernel whose package is missing on CUDA, `ConfigError` for another type than bf16 or
    fp16."""
    key, device_type, package = "model.attn_implementation", get_device_type(), _PACKAGES.get(name)
    if package is None:
        return
    if device_type == "cuda" and importlib.util.find_spec(package) is None:
        raise MachineError(
            f"'{name}' needs the package {package}, which is not installed",
            key=key,
            way_out="Install it, or take 'sdpa'.",
        )
    if param_dtype not in _HALF:
        raise ConfigError(
            f"'{name}' computes in bf16 or fp16 only",
            key=key,
            way_out="Set parallel.fsdp_plan.param_dtype: bf16, or take 'sdpa'.",
        )
