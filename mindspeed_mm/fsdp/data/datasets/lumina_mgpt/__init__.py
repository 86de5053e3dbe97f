"""Conversations whose answers may be pictures; importing this package registers the data set."""

from mindspeed_mm.fsdp.data.datasets.lumina_mgpt import lumina_mgpt_dataset as lumina_mgpt_dataset
