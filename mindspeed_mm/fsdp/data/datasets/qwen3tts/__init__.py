"""Texts and the codes of their speech for Qwen3-TTS; importing this package registers the data set."""

from mindspeed_mm.fsdp.data.datasets.qwen3tts import qwen3tts_dataset as qwen3tts_dataset
