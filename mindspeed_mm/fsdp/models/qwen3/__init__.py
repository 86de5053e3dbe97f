"""Qwen3, dense: the class of transformers; importing this package registers it."""

from mindspeed_mm.fsdp.models.qwen3 import modeling_qwen3 as modeling_qwen3
