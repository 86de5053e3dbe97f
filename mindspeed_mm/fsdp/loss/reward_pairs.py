"""Training of a reward model on pairs of videos, each compared in K dimensions (arXiv:2501.13918).

P pairs are 2P rows of a micro-batch: those of the first sides, then those of the second. d is the score of the first
minus that of the second, (P, K). A choice is 1 where the first is better, -1 where the second is, 0 for a tie, and
anything else where nothing is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mindspeed_mm.core.batch import IGNORED_LABEL, Batch
from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.loss.objectives import BatchTokens, ModelInputs, Terms, text_tokens
from mindspeed_mm.fsdp.ops.linear_cross_entropy import wide_dtype
from mindspeed_mm.fsdp.utils.model_parts import attribute_at

TIES = 5.0
"""θ of Bradley-Terry with ties, as published: how much better a side must be for no tie."""
MARGIN = 0.57
"""Of `constant_margin`, as published."""

RewardLoss = Callable[[Tensor, Tensor], Tensor]
"""d and choices of 1, 0 and -1 → the loss of each, (P, K)."""


def _with_ties(d: Tensor, choices: Tensor) -> Tensor:
    """Return −log of the probability of a choice (Rao and Kupper 1967; arXiv:2501.13918, equation 2): of a winner
    σ(±d − log θ), and of a tie (θ² − 1) · σ(d − log θ) · σ(−d − log θ)."""
    first, second = F.logsigmoid(d - math.log(TIES)), F.logsigmoid(-d - math.log(TIES))
    tie = -first - second - math.log(TIES**2 - 1)
    return torch.where(choices == 0, tie, -torch.where(choices == 1, first, second))


def _without_ties(d: Tensor, choices: Tensor, margin: float = 0.0) -> Tensor:
    """Return −log σ(±d − margin) (Bradley and Terry 1952); a tie teaches nothing."""
    return -F.logsigmoid(d * choices - margin) * (choices != 0)


REWARD_LOSSES: Mapping[str, RewardLoss] = {
    "btt": _with_ties,
    "bt": _without_ties,
    "constant_margin": lambda d, choices: _without_ties(d, choices, MARGIN),
}
"""Name in `reward_loss` of a model's configuration → the loss."""


class RewardPairObjective:
    """The mean over all pairs and dimensions; as published, those of which nothing is known count, with a loss of 0.

    In the log only: `rewards/margins`, by how much the better side has more, and `rewards/accuracies`, how often it
    has; both over what is no tie.

    Args:
        model: Returns `rewards` (2P, K).

    Raises:
        ConfigError: The configuration names another loss.
    """

    term, margin_term, accuracy_term = "loss", "rewards/margins", "rewards/accuracies"

    def __init__(self, model: nn.Module) -> None:
        self._inputs = ModelInputs(model)
        self._name = str(attribute_at(model, "config.reward_loss", "btt"))
        if self._name not in REWARD_LOSSES:
            known = ", ".join(REWARD_LOSSES)
            raise ConfigError(f"'{self._name}' is not one of {known}", key="model.reward_loss", way_out="Set one.")

    def prepare(self, batch: Batch, *, training: bool = True) -> Batch:
        """Add which choices count.

        Raises:
            DataError: The rows are no pairs of videos.
        """
        if "preferences" not in batch:
            raise DataError(
                "the batch holds no pairs of videos",
                key="data.dataset_param.dataset_type",
                way_out="Set dataset_type: rewardvideo.",
            )
        choices = batch["preferences"]
        marks = batch["labels"].gather(1, batch["reward_places"])
        counts = marks[: len(choices)] != IGNORED_LABEL  # not those of rows that only fill up
        return batch | {"_choices": choices, "_counts": counts, "_known": counts & (choices.abs() <= 1)}

    def tokens(self, batch: Batch) -> BatchTokens:
        """Real tokens of both sides, and the marks."""
        return text_tokens(batch)

    def count(self, batches: Sequence[Batch]) -> dict[str, float]:
        """All choices; of what is measured, those that are known and no tie."""
        chosen = sum(int((batch["_known"] & (batch["_choices"] != 0)).sum()) for batch in batches)
        whole = sum(int(batch["_counts"].sum()) for batch in batches)
        return {self.term: whole, self.margin_term: chosen, self.accuracy_term: chosen}

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        """Sums over the choices of this micro-batch."""
        rewards = model(**self._inputs(batch)).rewards
        first, second = rewards.to(wide_dtype(rewards.dtype)).chunk(2)
        d, choices, known = first - second, batch["_choices"], batch["_known"]
        # A choice that is not known may be any number; it is multiplied by 0.
        losses = REWARD_LOSSES[self._name](d, choices.clamp(-1, 1)) * known
        won = (d * choices * (known & (choices != 0))).detach()
        return {
            self.term: losses.sum(),
            self.margin_term: won.sum(),
            self.accuracy_term: (won > 0).to(won).sum(),
        }

    def describe(self) -> str:
        """Return a phrase for the log: the loss of pairs."""
        return f"rewards of pairs, {self._name}"


def scores_videos(model: nn.Module) -> bool:
    """Whether a model is trained on pairs of videos, which it states."""
    return bool(attribute_at(model, "scores_videos", False))
