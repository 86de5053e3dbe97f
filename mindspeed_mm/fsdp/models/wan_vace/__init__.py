"""Wan VACE: the class of diffusers; importing this package registers it."""

from mindspeed_mm.fsdp.models.wan_vace import modeling_wan_vace as modeling_wan_vace
