"""HunyuanVideo-1.5: the classes of diffusers; importing this package registers it."""

from mindspeed_mm.fsdp.models.hunyuan_video_1_5 import modeling_hunyuan_video_1_5 as modeling_hunyuan_video_1_5
