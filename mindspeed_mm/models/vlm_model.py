"""Another path of `VLModel`."""

from mindspeed_mm.models.vl_model import VLModel

__all__ = ["VLModel"]
