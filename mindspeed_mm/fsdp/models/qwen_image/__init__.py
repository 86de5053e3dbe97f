"""Qwen-Image: the classes of diffusers; importing this package registers it."""

from mindspeed_mm.fsdp.models.qwen_image import modeling_qwen_image as modeling_qwen_image
