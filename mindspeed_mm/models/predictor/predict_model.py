"""Another path of `PredictModel`, which scripts import."""

from mindspeed_mm.models.predictor import PredictModel

__all__ = ["PredictModel"]
