"""Stable Diffusion 3: the classes of diffusers; importing this package registers it."""

from mindspeed_mm.fsdp.models.sd3 import modeling_sd3 as modeling_sd3
