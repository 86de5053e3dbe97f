"""Which attention kernel a model is built with."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.fsdp.ops.attention import ATTENTION_NAME
from mindspeed_mm.fsdp.utils.device import get_device_type

_ALIASES = {"flex": "flex_attention"}
_PACKAGES = {"flash_attention_3": "flash_attn_interface", "flash_attention_2": "flash_attn"}
_HALF = (torch.bfloat16, torch.float16)


def resolve_attn_implementation(
    requested: str | None, model_class: Any = None, *, param_dtype: torch.dtype | None = None
) -> str:
    """The name to hand to transformers: the one asked for, or the best that runs here.

    Args:
        requested: `model.attn_implementation`.
        model_class: Says what it supports (`_supports_sdpa`, `_supports_flash_attn`); anything when None.
        param_dtype: What the model computes in: flash attention takes bf16 and fp16 only.

    Raises:
        MachineError: The package of the kernel asked for is not installed.
        ConfigError: The kernel asked for does not compute in `param_dtype`.
    """
    name = _ALIASES.get(requested or "", requested or "")
    if name in _PACKAGES:
        _check_flash(name, param_dtype)
    if name:
        return name
    has_flash = getattr(model_class, "_supports_flash_attn", True) and param_dtype in _HALF
    if has_flash and get_device_type() == "cuda":
        for name, package in _PACKAGES.items():
            if importlib.util.find_spec(package) is not None:
                return name
    if not getattr(model_class, "_supports_sdpa", True):
        return "eager"
    # The same kernels to the bit, but right-padded batches need no dense mask, and packed rows are exact.
    return ATTENTION_NAME if getattr(model_class, "_supports_attention_backend", False) else "sdpa"


def _check_flash(name: str, param_dtype: torch.dtype | None) -> None:
    key = "model.attn_implementation"
    package = _PACKAGES[name]
    if get_device_type() == "cuda" and importlib.util.find_spec(package) is None:
        raise MachineError(
            f"'{name}' needs the package {package}, which is not installed",
            key=key,
            way_out="Install it, or take 'sdpa'.",
        )
    if get_device_type() == "cpu":
        raise MachineError(f"'{name}' does not run on a CPU", key=key, way_out="Take 'sdpa', or leave it out.")
    if param_dtype not in _HALF:
        raise ConfigError(
            f"'{name}' computes in bf16 or fp16 only",
            key=key,
            way_out="Set parallel.fsdp_plan.param_dtype: bf16, or take 'sdpa'.",
        )
