"""Wan2.1: the classes of diffusers; importing this package registers it."""

from mindspeed_mm.fsdp.models.wan import modeling_wan as modeling_wan
