"""Texts and the codes of their speech for MOSS-TTS; importing this package registers the data set."""

from mindspeed_mm.fsdp.data.datasets.moss_tts_delay import moss_tts_delay_dataset as moss_tts_delay_dataset
