"""Empty modules that scripts of MindSpeed-MM import. There they change Megatron, and here is none to change."""

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
