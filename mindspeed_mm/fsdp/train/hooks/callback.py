"""A function of the caller's that is called after every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from typing_extensions import override

from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine


class CallbackHook(Hook):
    """Calls a function after every step, validation and save included; when it returns True the run ends there.

    Args:
        function: Called with the step's result.
    """

    def __init__(self, function: Callable[[StepResult], object]) -> None:
        self._function = function

    @override
    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        if engine.validated_step == result.step:
            result = replace(result, validation=engine.validation)
        if self._function(result) is True:
            engine.stop()
