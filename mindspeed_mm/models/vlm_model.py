"""Another path of `VLModel`, and another name."""

from mindspeed_mm.models.vl_model import VLModel

VLMModel = VLModel

__all__ = ["VLMModel", "VLModel"]
