"""Texts and the speech tokens that say them; importing this package registers the data set."""

from mindspeed_mm.fsdp.data.datasets.cosyvoice import cosyvoice_dataset as cosyvoice_dataset
