"""Z-Image: the classes of diffusers; importing this package registers it."""

from mindspeed_mm.fsdp.models.z_image import modeling_z_image as modeling_z_image
