"""What draws in Ming-Lite-Omni; importing this package registers it."""

from mindspeed_mm.fsdp.models.ming_draw import modeling_ming_draw as modeling_ming_draw
