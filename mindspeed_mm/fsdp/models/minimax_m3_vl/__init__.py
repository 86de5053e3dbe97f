"""MiniMax-M3-VL: the class of transformers; importing this package registers it."""

from mindspeed_mm.fsdp.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling_minimax_m3_vl
