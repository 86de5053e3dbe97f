"""SANA: the classes of diffusers; importing this package registers it."""

from mindspeed_mm.fsdp.models.sana import modeling_sana as modeling_sana
