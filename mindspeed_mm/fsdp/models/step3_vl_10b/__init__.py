"""Step3-VL-10B, written here on the tower of Step-3.7 and on Qwen3; importing this package registers it."""

from mindspeed_mm.fsdp.models.step3_vl_10b import modeling_step3_vl_10b as modeling_step3_vl_10b
