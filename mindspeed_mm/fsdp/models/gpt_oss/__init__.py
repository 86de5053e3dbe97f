"""GPT-OSS: the class of transformers; importing this package registers it."""

from mindspeed_mm.fsdp.models.gpt_oss import modeling_gpt_oss as modeling_gpt_oss
