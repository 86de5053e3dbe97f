"""FLUX.2: the classes of diffusers; importing this package registers it."""

from mindspeed_mm.fsdp.models.flux2 import modeling_flux2 as modeling_flux2
