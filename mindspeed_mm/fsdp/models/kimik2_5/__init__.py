"""Kimi-K2.5: the class of transformers; importing this package registers it."""

from mindspeed_mm.fsdp.models.kimik2_5 import modeling_kimik2_5 as modeling_kimik2_5
