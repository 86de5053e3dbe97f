"""Qwen3-VL, dense: the class of transformers; importing this package registers it."""

from mindspeed_mm.fsdp.models.qwen3vl import modeling_qwen3vl as modeling_qwen3vl
