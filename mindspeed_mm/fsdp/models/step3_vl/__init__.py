"""Step-3.7: the class of transformers; importing this package registers it."""

from mindspeed_mm.fsdp.models.step3_vl import modeling_step3_vl as modeling_step3_vl
