"""MOSS-TTS: text to the codes of a 12.5 Hz codec, under a delay pattern. Importing this package registers it."""

from mindspeed_mm.fsdp.models.moss_tts_delay import modeling_moss_tts_delay as modeling_moss_tts_delay
