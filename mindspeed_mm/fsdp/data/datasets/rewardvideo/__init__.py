"""Pairs of videos with a choice in each dimension, for VideoAlign; importing this package registers the data set."""

from mindspeed_mm.fsdp.data.datasets.rewardvideo import rewardvideo_dataset as rewardvideo_dataset
