"""What happens around the steps of a run: the moments at which hooks are called, and what a step was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mindspeed_mm.fsdp.loss.objectives import is_measured
from mindspeed_mm.fsdp.train.step.tally import Tally

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.train.train_engine import TrainEngine


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step was; losses and norm are global."""

    step: int
    losses: dict[str, float]
    grad_norm: float
    lr: float
    tally: Tally
    seconds: float
    data_seconds: float
    skipped: str = ""
    """Why the step was not applied, with rank and samples; empty when it was."""
    validation: Mapping[str, float] = field(default_factory=dict)
    """What a validation after this step measured, `val_loss` first; empty when there was none. Filled in for functions
    that are called after the step."""
    loss_scale: float | None = None
    """What the loss was multiplied by for the backward pass; None where gradients need none."""

    @property
    def loss(self) -> float:
        """Sum of all terms that are minimised."""
        return sum(value for name, value in self.losses.items() if not is_measured(name))


class Hook:
    """Something that happens around steps. Every method is optional."""

    def on_train_begin(self, engine: TrainEngine) -> None:
        """Called once when training begins, before the first step of this start."""

    def on_gradients(self, engine: TrainEngine, norm: torch.Tensor) -> None:
        """Between the backward passes of a step and its update: gradients are whole and not clipped, `norm` is
        theirs."""

    def is_called_at_once(self, engine: TrainEngine, step: int) -> bool:
        """Whether `on_step_end` of a step must be called before anything of the next one is done, for which the host
        waits on an accelerator. Asked before the step; where one rank asks for it, all do it. When it is not, the call
        comes within the next step, before its update: weights are still those after the step, but gradients, random
        numbers and the place in the data are not.

        True of a hook with an `on_step_end` that does not say otherwise."""
        return type(self).on_step_end is not Hook.on_step_end

    def on_step_launched(self, engine: TrainEngine) -> None:
        """Called when a step was handed to the device, before its `on_step_end`; its numbers may not be known yet."""

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Called after each optimizer step with its result, also where the update was skipped."""

    def before_next_step(self, engine: TrainEngine) -> None:
        """Called after each step, when all hooks that are called at once were, before the next one begins."""

    def on_train_end(self, engine: TrainEngine) -> None:
        """After the last step, or after a stop that was asked for."""

    def on_failure(self, engine: TrainEngine) -> None:
        """Training ends with an error: finish what was begun and let go of what is held."""
        self.on_train_end(engine)
