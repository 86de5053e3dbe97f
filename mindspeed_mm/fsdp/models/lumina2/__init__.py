"""Lumina-Image 2: the classes of diffusers; importing this package registers it."""

from mindspeed_mm.fsdp.models.lumina2 import modeling_lumina2 as modeling_lumina2
