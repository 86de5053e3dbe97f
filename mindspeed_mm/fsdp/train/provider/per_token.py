"""One denominator for all tokens of a step, known only after its forward passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.loss.objectives import Terms
from mindspeed_mm.fsdp.optimizer.clip_grad import unscale_grads_
from mindspeed_mm.fsdp.train.provider.objective import ProviderObjective
from mindspeed_mm.fsdp.train.step.forward_backward import ForwardBackward


class PerTokenForwardBackward:
    """Another strategy, whose gradients are corrected once a step: losses are sums, and what they are divided by in the
    end is the number of tokens in all N micro-batches of all D data ranks, as Megatron-Core's `finalize_model_grads`
    does with `calculate_per_token_loss`. Inside they are divided by N·D, which keeps gradients in the range of others.

    Args:
        inner: What is done with the micro-batches.
        model: Whose gradients are corrected.
        objective: Notes the tokens.
        groups: Ranks that hold other tokens of the step, and stages that hold none; summed over one after the other.
        data_ranks: D.
        device: Where the numbers are.
    """

    def __init__(
        self,
        inner: ForwardBackward,
        model: nn.Module,
        objective: ProviderObjective,
        groups: Sequence[dist.ProcessGroup],
        data_ranks: int,
        device: torch.device,
    ) -> None:
        self._inner, self._model, self._objective = inner, model, objective
        self._groups, self._data_ranks, self._device = tuple(groups), data_ranks, device

    def __call__(self, micro_batches: Sequence[Batch], denominators: Mapping[str, float]) -> Terms:
        """Accumulate the step's gradients and return its terms, both divided by the number of tokens; arguments as in
        `ForwardBackward`."""
        sums = self._inner(micro_batches, denominators)
        divisor = self._take_tokens() / (len(micro_batches) * self._data_ranks)
        unscale_grads_(self._model.parameters(), divisor)
        return {name: value / divisor for name, value in sums.items()}

    def evaluate(self, micro_batches: Sequence[Batch]) -> Terms:
        """See `ForwardBackward`. The engine divides by N·D, too."""
        sums = self._inner.evaluate(micro_batches)
        divisor = self._take_tokens() / (len(micro_batches) * self._data_ranks)
        return {name: value / divisor for name, value in sums.items()}

    def _take_tokens(self) -> torch.Tensor:
        """Of the whole step, at least one."""
        noted = self._objective.tokens_of_losses
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for each in noted:
            total = total + each.to(total)
        noted.clear()
        for group in self._groups:
            dist.all_reduce(total, group=group)
        return total.clamp(min=1)
