"""HunyuanVideo: the classes of diffusers; importing this package registers it."""

from mindspeed_mm.fsdp.models.hunyuan_video import modeling_hunyuan_video as modeling_hunyuan_video
