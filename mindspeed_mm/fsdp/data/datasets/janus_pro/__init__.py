"""Conversations whose answers may be pictures, for Janus-Pro; importing this package registers the data set."""

from mindspeed_mm.fsdp.data.datasets.janus_pro import janus_pro_dataset as janus_pro_dataset
