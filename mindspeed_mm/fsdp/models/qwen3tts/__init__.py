"""Qwen3-TTS: text to the codes of a 12 Hz codec. Importing this package registers it."""

from mindspeed_mm.fsdp.models.qwen3tts import modeling_qwen3tts as modeling_qwen3tts
