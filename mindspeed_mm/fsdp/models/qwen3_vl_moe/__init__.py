"""Qwen3-VL, mixture of experts: the class of transformers; importing this package registers it."""

from mindspeed_mm.fsdp.models.qwen3_vl_moe import modeling_qwen3_vl_moe as modeling_qwen3_vl_moe
