"""Qwen3-ASR: the class of transformers; importing this package registers it."""

from mindspeed_mm.fsdp.models.qwen3_asr import modeling_qwen3_asr as modeling_qwen3_asr
