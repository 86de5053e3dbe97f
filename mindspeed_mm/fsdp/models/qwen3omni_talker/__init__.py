"""Qwen3-Omni, talker: conversations to the codes of their spoken answers. Importing this package registers it."""

from mindspeed_mm.fsdp.models.qwen3omni_talker import modeling_qwen3omni_talker as modeling_qwen3omni_talker
