"""BAGEL, written here; importing this package registers it."""

from mindspeed_mm.fsdp.models.bagel import modeling_bagel as modeling_bagel
