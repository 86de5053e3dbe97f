"""InternVL-U, written here; importing this package registers it."""

from mindspeed_mm.fsdp.models.internvlu import modeling_internvlu as modeling_internvlu
