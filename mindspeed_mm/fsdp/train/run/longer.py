"""What happens to the learning rate of a run that is resumed with another length or another schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mindspeed_mm.fsdp.optimizer.schedules import Schedule
from mindspeed_mm.fsdp.params.training_args import TrainingArguments
from mindspeed_mm.fsdp.train.build_engine import build_lr_schedule

TOTAL_STEPS = "total_steps"
"""In the context of a checkpoint: the length of the run that saved it."""


def jump_of_rate(context: Mapping[str, Any], iteration: int, schedule: Schedule, training: TrainingArguments) -> str:
    """From which to which learning rate a resumed run goes, where its next step would have had another one.

    Args:
        context: Of the checkpoint, which holds the configuration that saved it.
        iteration: Steps done.
        schedule: From here on.
        training: The `training` section now.

    Returns:
        A sentence; empty where the schedule goes on as it was, or that is not known.
    """
    then = (context.get("config") or {}).get("training") or {}
    total = context.get(TOTAL_STEPS) or (None if then.get("train_epochs") else then.get("train_iters"))
    if not isinstance(total, int) or iteration < 1:
        return ""
    old = {key: value for key, value in then.items() if key.startswith("lr") and key != "lr_scaling_plan"}
    before = build_lr_schedule(training.model_copy(update=old), total)
    if math.isclose(before.at(iteration), schedule.at(iteration), rel_tol=1e-9, abs_tol=0.0):
        return ""
    why = "the schedule has changed"
    if total != schedule.total_steps:
        why = f"the run is {schedule.total_steps:,} steps long, no longer {total:,}"
    return (
        f"{why}: the learning rate jumps from {before.at(iteration - 1):.3g} at step {iteration} to "
        f"{schedule.at(iteration):.3g} at step {iteration + 1}"
    )
