"""The loss of a code predictor, as a term beside that of the model's own head.

    code_predictor = factor · Σ (−log p(code_g | codes before it)) / N

over the codebooks behind the first of all frames; N counts these codes, over the whole step like any denominator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.loss.head_loss import output_of
from mindspeed_mm.fsdp.loss.objectives import BatchTokens, Terms, TokenCrossEntropy
from mindspeed_mm.fsdp.ops.linear_cross_entropy import whole_cross_entropy
from mindspeed_mm.fsdp.utils.model_parts import attribute_at

_COUNT = "_codes"


def code_loss_factor(model: nn.Module) -> float:
    """The weight of the code predictor's loss, which a model with one states (`code_loss_factor`); 0 without one."""
    return float(attribute_at(model, "code_loss_factor", 0.0))


class WithCodePredictor:
    """Next-token cross-entropy of the first codebook with that of the others beside it.

    The model returns `code_logits`, (N, G − 1, rows), and `code_targets`, (N, G − 1).

    Args:
        objective: Of the first codebook.
        factor: Of the others.
    """

    term = "code_predictor"

    def __init__(self, objective: TokenCrossEntropy, factor: float) -> None:
        self._objective, self._factor = objective, factor

    def prepare(self, batch: Batch, *, training: bool = True) -> Batch:
        """As the objective does; counts the codes."""
        codes = int((batch["codec_ids"][..., 1:] >= 0).sum())
        return self._objective.prepare(batch, training=training) | {_COUNT: codes}

    def tokens(self, batch: Batch) -> BatchTokens:
        """As the objective counts them."""
        return self._objective.tokens(batch)

    def count(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Return the objective's counts, and the number of codes behind the first codebook."""
        return {**self._objective.count(batches), self.term: sum(batch[_COUNT] for batch in batches)}

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        """The objective's, and factor × the sum over codes."""
        seen: list[Any] = []
        hook = model.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
        try:
            terms = self._objective.terms(model, batch)
        finally:
            hook.remove()
        logits, targets = output_of(seen[-1], "code_logits"), output_of(seen[-1], "code_targets")
        terms[self.term] = self._factor * whole_cross_entropy(logits.flatten(0, 1), targets.flatten()).loss
        return terms

    def describe(self) -> str:
        """Return a phrase for the log: the objective's own, and the factor of the further codebooks."""
        return f"{self._objective.describe()}; codebooks behind the first, factor {self._factor:g}"
