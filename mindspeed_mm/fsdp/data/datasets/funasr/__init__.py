"""Rows of FunASR's recipes; importing this package registers the data set."""

from mindspeed_mm.fsdp.data.datasets.funasr import funasr_dataset as funasr_dataset
