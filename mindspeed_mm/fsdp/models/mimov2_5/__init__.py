"""MiMo-V2.5, written here around the text model of MiMo-V2-Flash; importing this package registers it."""

from mindspeed_mm.fsdp.models.mimov2_5 import modeling_mimov2_5 as modeling_mimov2_5
