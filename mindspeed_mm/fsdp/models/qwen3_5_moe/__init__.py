"""Qwen3.5 and 3.6, mixture of experts: the class of transformers; importing this package registers it."""

from mindspeed_mm.fsdp.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling_qwen3_5_moe
