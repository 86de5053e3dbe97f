"""FLUX.1: the classes of diffusers; importing this package registers it."""

from mindspeed_mm.fsdp.models.flux import modeling_flux as modeling_flux
