"""Janus-Pro that draws as well as it sees. Importing this package registers it."""

from mindspeed_mm.fsdp.models.janus_pro import modeling_janus_pro as modeling_janus_pro
