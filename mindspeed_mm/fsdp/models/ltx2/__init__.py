"""LTX-2: the classes of diffusers; importing this package registers it."""

from mindspeed_mm.fsdp.models.ltx2 import modeling_ltx2 as modeling_ltx2
