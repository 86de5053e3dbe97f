"""Modules of this name change Megatron in MindSpeed-MM. There is no Megatron here to change: they can be imported, and
hold nothing."""

from mindspeed_mm.patchs import (
    dummy_optimizer_patch,
    meta_device_patches,
    ring_attn_patch,
    torch_dcp_patch,
    ulysses_patches,
)

__all__ = [
    "dummy_optimizer_patch",
    "meta_device_patches",
    "ring_attn_patch",
    "torch_dcp_patch",
    "ulysses_patches",
]
