"""Janus-Pro: the class of transformers; importing this package registers it."""

from mindspeed_mm.fsdp.models.janus import modeling_janus as modeling_janus
