"""CogVideoX: the classes of diffusers; importing this package registers it."""

from mindspeed_mm.fsdp.models.cogvideox import modeling_cogvideox as modeling_cogvideox
