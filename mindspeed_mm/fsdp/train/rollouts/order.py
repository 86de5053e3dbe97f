"""What a rollout is: what a kind of model does for it (it draws samples, has them judged and makes batches of them),
which prompts make it, which optimizer steps it serves, where a run that was stopped goes on in them, a number that
tells the weights that drew it from others, and what the log says of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import CheckpointError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.data import DataPosition, MMDataLoader
from mindspeed_mm.fsdp.data.dataloader.order import RolloutPlace
from mindspeed_mm.fsdp.loss.policy_gradient import Advantages
from mindspeed_mm.fsdp.train.rollouts import files


@dataclass(frozen=True)
class RolloutPlan:
    """Settings that decide how a rollout is cut into optimizer steps and how its rewards become advantages."""

    group_size: int
    """Samples of each prompt."""
    steps: int = 1
    """Optimizer steps that a rollout is cut into."""
    iterations: int = 1
    """How often it is trained on."""
    scale: Any = "group"
    aggregation: Any = "sum_then_normalize"
    """Of `group_advantages`."""
    ahead: int = 0
    """1: the samples of the next rollout are drawn while a rollout is trained on."""

    @property
    def uses(self) -> int:
        """Optimizer steps of a rollout."""
        return self.steps * self.iterations


class RolloutSource(Protocol):
    """Samples of a policy that is being trained. Prompts and samples are of the source's own kind."""

    reward_names: list[str]
    reward_weights: torch.Tensor
    """(rewards,) fp64."""

    def drawing(self) -> AbstractContextManager[None]:
        """Inside, samples are drawn: the model is in evaluation mode, its parameters whole."""
        ...

    def draw(self, prompts: Sequence[Any], keys: Sequence[str]) -> list[Any]:
        """One sample for each prompt; a sample depends on the model, its prompt and its key alone."""
        ...

    def judge(self, prompts: Sequence[Any], samples: Sequence[Any]) -> torch.Tensor:
        """(samples, rewards) fp64 scores; not a number where a reward does not judge a sample."""
        ...

    def record(self, prompt: Any, sample: Any) -> JsonObject:
        """A sample as JSON takes it, exactly."""
        ...

    def restore(self, record: JsonMapping) -> object:
        """Rebuild the sample that `record` wrote."""
        ...

    def facts(self, samples: Sequence[Any]) -> dict[str, float]:
        """Sums of numbers for the log, by name; `samples`, of how many they are, divides them."""
        ...

    def batches(
        self, prompts: Sequence[Any], samples: Sequence[Any], advantages: torch.Tensor, *, is_fresh: bool
    ) -> list[Batch]:
        """The micro-batches of a step.

        Args:
            prompts: Of each sample.
            samples: Of this rank, group by group.
            advantages: (samples,).
            is_fresh: The policy has not changed since it drew them.
        """
        ...

    def take_metrics(self) -> dict[str, float]:
        """Numbers of the loss for the log, since the last call."""
        ...


# --- steps ------------------------------------------------------------------------------------------------------------


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

    def go_on(self, position: DataPosition, before: JsonMapping | None, *, may_skip: bool) -> str:
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
        stored = None
        if self.folder is not None:
            stored = files.read_rollout(self.folder, place.number)
        if stored is None or stored.digest != place.digest:
            state = "is not the one that the checkpoint was saved with" if stored else "is missing or broken"
            raise CheckpointError(
                f"the checkpoint was saved within rollout {place.number}, and its file {state}",
                where=str(files.rollout_file(self.folder or Path(), place.number)),
                key="posttrain.rollout.keep",
                way_out="Put the file back, or resume from an earlier checkpoint.",
            )
        return stored


# --- weights ----------------------------------------------------------------------------------------------------------

_AS_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def weights_mark(model: nn.Module) -> int:
    """Of all trained parameters, to the bit, on all ranks the same. Sums of whole numbers wrap around and are exact, so
    it depends on no order; another plan, which keeps copies elsewhere, gives another number."""
    total = torch.zeros((), dtype=torch.int64)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            bits = own.contiguous().view(_AS_WHOLE[own.element_size()])
            # One factor a name, so that swapped weights show; odd, so that no bit is lost modulo 2⁶⁴.
            factor = derive_seed(name) % 2**31 | 1
            total += bits.sum(dtype=torch.int64).cpu() * factor
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return int(total)


class RolloutMetrics:
    """Numbers of the rollouts since the last line of the log. Times and what `facts` tells are this rank's, rewards
    those of all ranks."""

    steps_behind: int | None = None
    """Optimizer steps between the weights that drew the last rollout and those that were trained with it; None: none
    is drawn ahead."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._rewards: list[torch.Tensor] = []
        self._scores: list[torch.Tensor] = []
        self._names: Sequence[str] = ()
        self._flat: list[float] = []
        self._times: dict[str, float] = {}
        self._drawn_tokens = 0.0

    def count(
        self,
        lines: Sequence[JsonMapping],
        names: Sequence[str],
        facts: Sequence[Mapping[str, float]],
    ) -> None:
        """A rollout that was drawn, or read where the very same one was drawn before."""
        for each in facts:
            for name, value in each.items():
                self._sums[name] = self._sums.get(name, 0.0) + value
        self._names = names
        self._scores.append(scores_of_lines(lines))

    def time(self, facts: Sequence[Mapping[str, float]], drawing_s: float, judging_s: float) -> None:
        """How long a rollout took that was drawn."""
        for name, seconds in (("rollout_s", drawing_s), ("reward_s", judging_s)):
            self._times[name] = self._times.get(name, 0.0) + seconds
        self._drawn_tokens += sum(each.get("completion_tokens", 0) for each in facts)

    def judge(self, found: Advantages) -> None:
        """Record the rewards of a rollout and its share of groups without spread for the next log line."""
        self._rewards.append(found.rewards)
        self._flat.append(found.without_spread)

    def take(self) -> dict[str, float]:
        """The numbers; empty where no rollout was begun, and without times where none was drawn."""
        if not self._rewards:
            return {}
        rewards, sums = torch.cat(self._rewards), dict(self._sums)
        known = rewards[~rewards.isnan()]
        metrics = {
            "reward": float(known.mean()),
            "reward_std": float(known.std()) if len(known) > 1 else 0.0,
            "groups_without_spread": sum(self._flat) / len(self._flat),
            **self._times,
        }
        if self._drawn_tokens and metrics["rollout_s"]:
            metrics["rollout_tokens_per_s"] = self._drawn_tokens / metrics["rollout_s"]
        samples = sums.pop("samples")
        for name, value in sums.items():
            metrics[name] = value / max(1, samples)
        if len(self._names) > 1:
            means = torch.cat(self._scores).nanmean(dim=0).tolist()
            for name, mean in zip(self._names, means, strict=True):
                metrics[f"reward/{name}"] = mean
        if self.steps_behind is not None:
            metrics["rollout_steps_behind"] = float(self.steps_behind)
        self.__init__()  # type: ignore[misc]
        return metrics


def scores_of_lines(lines: Sequence[JsonMapping]) -> torch.Tensor:
    """(samples, rewards) fp64 of what is written of samples; not a number where a reward does not judge one.

    Args:
        lines: Each with its `scores`: numbers, or null.
    """
    # numpy takes None for what is not a number.
    return torch.from_numpy(np.array([line["scores"] for line in lines], dtype=np.float64))
