"""Rows for InternVL-U; importing this package registers the data set."""

from mindspeed_mm.fsdp.data.datasets.internvlu import internvlu_dataset as internvlu_dataset
