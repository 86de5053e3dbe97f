"""The objective of a user's forward step: what it returns for each micro-batch, scaled as Megatron-Core scales it. One
denominator for all tokens of a step is known only after its forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm.core.batch import ENGINE_KEYS, IGNORED_LABEL, Batch
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.fsdp.loss.objectives import BatchTokens, Terms
from mindspeed_mm.fsdp.optimizer.clip_grad import unscale_grads_
from mindspeed_mm.fsdp.train.provider.callbacks import Callbacks, LossValue, name_of
from mindspeed_mm.fsdp.train.step.forward_backward import ForwardBackward

RAW = "_provided"
"""Key of the batch as the user's loader yielded it, in a prepared one."""
WITHHELD = ENGINE_KEYS - {"labels"}
"""Keys of the suite's own collators that no forward of a model takes."""


class ProviderObjective:
    """Calls the user's forward step for each micro-batch.

    With N micro-batches on each of D data ranks, Megatron-Core (`pipeline_parallel/schedules.py`, 0.12.1) divides each
    loss by N and averages gradients over D: the denominator is N·D. A loss that comes with a number of tokens is
    divided by it first, a number below one counting as one (0.12.1 divides by zero there). With `per_token`, losses and
    tokens are summed over the whole step, and gradients are divided once: `PerTokenForwardBackward` does, and here the
    loss stays a sum.

    Args:
        callbacks: The user's functions.
        per_token: `--calculate-per-token-loss`.
        present: What the forward step is called with, for the planned model; itself when None.
        needs_ids: Batches must be dicts with token ids, whose shape is that of what stages hand on.
    """

    term = "loss"

    def __init__(
        self,
        callbacks: Callbacks,
        *,
        per_token: bool = False,
        present: Callable[[nn.Module], nn.Module] | None = None,
        needs_ids: bool = False,
    ) -> None:
        self._callbacks, self._per_token, self._needs_ids = callbacks, per_token, needs_ids
        self._present = present or (lambda model: model)
        self.tokens_of_losses: list[torch.Tensor] = []
        """Tokens of the micro-batches since somebody last took them; filled with `per_token` alone."""
        self.reports: list[JsonObject] = []
        """What loss functions reported since somebody last took it, one entry a micro-batch."""

    def prepare(self, batch: Batch, *, training: bool = True) -> Batch:
        """The tensors of a batch for the engine to plan by, and the batch itself for the user.

        A batch of the suite's own loader is a prepared one but for the user's part.

        Raises:
            ConfigError: Stages are to be run, and the batch does not tell how many tokens they hand on.
        """
        if self._needs_ids and getattr(batch.get("input_ids"), "ndim", 0) != 2:
            raise ConfigError(
                "yields batches without 'input_ids', (B, L), by which stages know the shape of what they hand on",
                key="train_valid_test_datasets_provider",
                way_out="Yield dicts that have them, or set --pipeline-model-parallel-size 1.",
            )
        if RAW in batch:
            return batch
        own = {key: value for key, value in batch.items() if key not in WITHHELD}
        return {**batch, RAW: own}

    def tokens(self, batch: Batch) -> BatchTokens:
        """Token ids that are not padding; zeros where a batch has none."""
        ids, mask, labels = map(batch.get, ("input_ids", "attention_mask", "labels"))
        trained = int((labels != IGNORED_LABEL).sum()) if isinstance(labels, torch.Tensor) else 0
        if not isinstance(ids, torch.Tensor):
            return BatchTokens(0, trained)
        if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
            return BatchTokens(int(mask.sum()), trained)
        return BatchTokens(ids.numel(), trained)

    def count(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Micro-batches. With `per_token` too: the tokens are not known before the forward passes."""
        return {self.term: len(batches)}

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        """What the user's loss function returns for this micro-batch."""
        value = self._callbacks.run_forward(_own_part(batch), self._present(model))
        if torch.is_grad_enabled():
            self.reports.append({name: _detached(number) for name, number in value.report.items()})
        return {self.term: self._scaled(value)}

    def use(self, forward_step: Callable[..., object]) -> None:
        """Call another forward step from now on."""
        self._callbacks = replace(self._callbacks, forward_step=forward_step)

    def take_reports(self) -> list[JsonObject]:
        """`reports`, which are empty afterwards."""
        taken, self.reports = self.reports, []
        return taken

    def describe(self) -> str:
        """Return the forward step's name and how its losses are averaged, for the log."""
        mean = "per token of the step" if self._per_token else "the mean over micro-batches"
        return f"of {name_of(self._callbacks.forward_step)}, {mean}"

    def _scaled(self, value: LossValue) -> torch.Tensor:
        if not self._per_token:
            if value.tokens is None:
                return value.loss
            return value.loss / value.tokens.clamp(min=1)
        if value.tokens is None:
            raise ConfigError(
                "returned no number of tokens, which --calculate-per-token-loss divides by",
                key="loss_func",
                way_out="Return (loss summed over tokens, number of tokens, {name: number}).",
            )
        self.tokens_of_losses.append(value.tokens)
        return value.loss


def _own_part(batch: Batch) -> object:
    """The user's batch, its tensors on the device where it is a plain dict; a new one each time, as a forward step may
    change it and stages call it several times."""
    raw = batch[RAW]
    if type(raw) is not dict:
        return raw
    own = {}
    for key, value in raw.items():
        if key in batch:  # a stage behind the first is given no media: it has no towers
            own[key] = batch[key]
        elif not isinstance(key, str):
            own[key] = value
    return own


def _detached(number: object) -> object:
    if isinstance(number, torch.Tensor):
        return number.detach()
    if isinstance(number, (tuple, list)):
        return tuple(_detached(each) for each in number)
    return number


def reduce_reports(reports: Sequence[JsonMapping]) -> dict[str, torch.Tensor]:
    """Sums and divisors of what was reported, (2,) fp64 by name: a number counts once, a pair is a sum and its
    divisor."""
    found: dict[str, torch.Tensor] = {}
    for report in reports:
        for name, number in report.items():
            is_pair = isinstance(number, tuple) and len(number) == 2
            pair = number if is_pair else (number, 1)
            values = [torch.as_tensor(each).double().sum().cpu() for each in pair]
            found[name] = found.get(name, torch.zeros(2, dtype=torch.float64)) + torch.stack(values)
    return found


# --- one denominator for all tokens -----------------------------------------------------------------------------------


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
