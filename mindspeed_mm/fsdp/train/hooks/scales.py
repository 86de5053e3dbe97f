"""Scales of 8-bit weights, which are found between steps."""

from __future__ import annotations

from mindspeed_mm.fsdp.features.speed.low_precision import find_scales, scales_after_update
from mindspeed_mm.fsdp.train.run.parts import RunParts
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine


def scales_hook(parts: RunParts) -> Hook | None:
    """The hook, where the quantisation plan finds scales after updates."""
    is_asked = scales_after_update(parts.assembled.model, parts.arguments.training.quantization_plan)
    return ScalesHook() if is_asked else None


class ScalesHook(Hook):
    """Finds the scales of all 8-bit weights after each update, by one reduction."""

    def on_train_begin(self, engine: TrainEngine) -> None:
        """Those of the weights that the run starts with."""
        find_scales(engine.model)

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Those of the new weights."""
        find_scales(engine.model)
