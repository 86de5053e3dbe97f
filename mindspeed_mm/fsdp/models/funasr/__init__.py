"""Fun-ASR-Nano: the class of transformers; importing this package registers it."""

from mindspeed_mm.fsdp.models.funasr import modeling_funasr as modeling_funasr
