"""Another path of `AEModel`."""

from mindspeed_mm.models.ae import AEModel

__all__ = ["AEModel"]
