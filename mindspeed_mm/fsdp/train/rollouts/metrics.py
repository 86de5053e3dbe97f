"""What the log says of rollouts: time, speed, rewards, lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mindspeed_mm.fsdp.loss.advantages import Advantages


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
        lines: Sequence[Mapping[str, Any]],
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


def scores_of_lines(lines: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """(samples, rewards) fp64 of what is written of samples; not a number where a reward does not judge one.

    Args:
        lines: Each with its `scores`: numbers, or null.
    """
    # numpy takes None for what is not a number.
    return torch.from_numpy(np.array([line["scores"] for line in lines], dtype=np.float64))
