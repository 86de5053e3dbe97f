"""Kimi-VL, written here on the classes of Kimi-K2.5; importing this package registers it."""

from mindspeed_mm.fsdp.models.kimi_vl import modeling_kimi_vl as modeling_kimi_vl
