"""Qwen3.5 and 3.6, dense: the class of transformers; importing this package registers it."""

from mindspeed_mm.fsdp.models.qwen3_5 import modeling_qwen3_5 as modeling_qwen3_5
