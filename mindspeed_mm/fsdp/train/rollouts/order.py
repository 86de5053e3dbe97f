"""Which prompts make a rollout, which optimizer steps it serves, and where a run that was stopped goes on in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from mindspeed_mm.core.errors import CheckpointError
from mindspeed_mm.fsdp.data import DataPosition, MMDataLoader
from mindspeed_mm.fsdp.data.dataloader.order import RolloutPlace
from mindspeed_mm.fsdp.train.rollouts import files
from mindspeed_mm.fsdp.train.rollouts.source import RolloutPlan


class RolloutOrder:
    """The steps of a run that trains on its own samples.

    Args:
        prompts: Yields the prompts of a rollout: a batch (`prompts`) for each step of it.
        plan: How rollouts become steps.
        folder: Where rollouts are kept; None: nowhere.
    """

    def __init__(self, prompts: MMDataLoader, plan: RolloutPlan, folder: Path | None) -> None:
        self.prompts, self.plan, self.folder = prompts, plan, folder
        self.position = prompts.position

    @property
    def batching(self) -> dict[str, Any]:
        """What must be the same when a run is resumed."""
        plan = self.plan
        own = {"num_generations": plan.group_size, "steps_per_generation": plan.steps, "iterations": plan.iterations}
        return {**self.prompts.batching, **own}

    def steps_for(self, epochs: float) -> int:
        """Optimizer steps until so many epochs of prompts are done."""
        return self.prompts.steps_for(epochs) * self.plan.uses

    def go_on(self, position: DataPosition, before: Mapping[str, Any] | None, *, may_skip: bool) -> str:
        """Take up a position that was saved.

        Raises:
            CheckpointError: The run stopped within a rollout whose file is gone.
        """
        self.check_kept(position)
        note = self.prompts.go_on(replace(position, rollout=None), before, may_skip=may_skip)
        self.position = replace(self.prompts.position, rollout=position.rollout)
        return note

    def learn_bad_samples(self, found: dict[str, str]) -> None:
        """Prompts that all ranks, or a run before it was stopped, found to be of no use."""
        self.prompts.learn_bad_samples(found)

    def check_kept(self, position: DataPosition) -> None:
        """Raise `CheckpointError` when the run stopped within a rollout whose file is gone."""
        if self.is_within(position.rollout):
            self.stored(position.rollout)

    def is_within(self, place: RolloutPlace | None) -> TypeGuard[RolloutPlace]:
        """Whether a rollout that has begun still serves steps."""
        return place is not None and place.used < self.plan.uses

    def stored(self, place: RolloutPlace) -> files.StoredRollout:
        """The rollout that a run stopped within.

        Raises:
            CheckpointError: Its file is gone.
        """
        stored = files.read_rollout(self.folder, place.number) if self.folder is not None else None
        if stored is None or stored.digest != place.digest:
            state = "is not the one that the checkpoint was saved with" if stored else "is missing or broken"
            raise CheckpointError(
                f"the checkpoint was saved within rollout {place.number}, and its file {state}",
                where=str(files.rollout_file(self.folder or Path(), place.number)),
                key="posttrain.rollout.keep",
                way_out="Put the file back, or resume from an earlier checkpoint.",
            )
        return stored
