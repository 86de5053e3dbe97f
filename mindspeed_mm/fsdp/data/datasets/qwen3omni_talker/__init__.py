"""Conversations whose answers are spoken, for Qwen3-Omni's talker; importing this package registers the data set."""

from mindspeed_mm.fsdp.data.datasets.qwen3omni_talker import qwen3omni_talker_dataset as qwen3omni_talker_dataset
