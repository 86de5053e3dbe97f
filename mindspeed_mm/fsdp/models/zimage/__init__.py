"""Z-Image: the classes of diffusers; importing this package registers it."""

from mindspeed_mm.fsdp.models.zimage import modeling_zimage as modeling_zimage
