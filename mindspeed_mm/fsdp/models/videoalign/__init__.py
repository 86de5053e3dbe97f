"""VideoAlign's reward model (VideoReward), a Qwen2-VL that scores videos; importing this package registers it."""

from mindspeed_mm.fsdp.models.videoalign import modeling_videoalign as modeling_videoalign
