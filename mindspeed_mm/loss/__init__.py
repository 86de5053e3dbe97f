"""Loss functions at the path that scripts import: the engine's, for forward steps of your own."""

from mindspeed_mm.fsdp.loss.denoising import DenoisingObjective
from mindspeed_mm.fsdp.loss.objectives import ModelLoss, Objective, TokenCrossEntropy, build_objective
from mindspeed_mm.fsdp.ops.linear_cross_entropy import linear_cross_entropy

__all__ = [
    "DenoisingObjective",
    "ModelLoss",
    "Objective",
    "TokenCrossEntropy",
    "build_objective",
    "linear_cross_entropy",
]
