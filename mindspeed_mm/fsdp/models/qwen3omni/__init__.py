"""Qwen3-Omni, thinker: the class of transformers; importing this package registers it."""

from mindspeed_mm.fsdp.models.qwen3omni import modeling_qwen3omni as modeling_qwen3omni
