"""Rows for models that answer and draw; importing this package registers the data set."""

from mindspeed_mm.fsdp.data.datasets.bagel import bagel_dataset as bagel_dataset
