"""What a kind of model does for rollouts: it draws samples, has them judged and makes batches of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mindspeed_mm.core.batch import Batch


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

    def record(self, prompt: Any, sample: Any) -> dict[str, Any]:
        """A sample as JSON takes it, exactly."""
        ...

    def restore(self, record: Mapping[str, Any]) -> Any:
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
