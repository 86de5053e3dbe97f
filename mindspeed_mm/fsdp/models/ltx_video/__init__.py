"""LTX-Video: the classes of diffusers; importing this package registers it."""

from mindspeed_mm.fsdp.models.ltx_video import modeling_ltx_video as modeling_ltx_video
