"""Another path of `AEModel`, which scripts import."""

from mindspeed_mm.models.ae import AEModel

__all__ = ["AEModel"]
