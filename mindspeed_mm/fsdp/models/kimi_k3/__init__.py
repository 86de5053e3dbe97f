"""Kimi-K3, written here on the classes of Kimi Linear and Kimi-K2.5; importing this package registers it."""

from mindspeed_mm.fsdp.models.kimi_k3 import modeling_kimi_k3 as modeling_kimi_k3
