"""Another path of `PredictModel`."""

from mindspeed_mm.models.predictor import PredictModel

__all__ = ["PredictModel"]
