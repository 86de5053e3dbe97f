"""DeepSeek-VL2, written here; importing this package registers it."""

from mindspeed_mm.fsdp.models.deepseek_vl2 import modeling_deepseek_vl2 as modeling_deepseek_vl2
