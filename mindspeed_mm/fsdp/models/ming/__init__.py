"""Ming-Lite-Omni, written here; importing this package registers it."""

from mindspeed_mm.fsdp.models.ming import modeling_ming as modeling_ming
