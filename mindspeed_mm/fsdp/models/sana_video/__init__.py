"""SANA-Video: the classes of diffusers; importing this package registers it."""

from mindspeed_mm.fsdp.models.sana_video import modeling_sana_video as modeling_sana_video
