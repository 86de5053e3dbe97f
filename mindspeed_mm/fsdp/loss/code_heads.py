"""Text and the codebooks of a codec, each predicted by a head of its own at the same places: a loss term for every
head, each with a denominator of its own.

    loss = Σ (−log p(word_t | before)) / ((G + 1) · N),  codebook_g = Σ (−log p(code_tg | before)) / ((G + 1) · N_g)

over the N labels of text and the N_g labels of codebook g, counted over the whole step. Their sum is the published
loss, the mean of the heads' means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from mindspeed_mm.core.batch import IGNORED_LABEL, Batch
from mindspeed_mm.fsdp.loss.head_loss import output_of
from mindspeed_mm.fsdp.loss.objectives import BatchTokens, Terms, TokenCrossEntropy
from mindspeed_mm.fsdp.ops.linear_cross_entropy import whole_cross_entropy

_COUNTS = "_codes_of_books"


class WithCodeHeads:
    """Next-token cross-entropy of text, with that of every codebook beside it.

    The model takes `code_places`, (M,), and returns `code_logits`, (M, G, C).

    Args:
        objective: Of text.
        books: G.
    """

    def __init__(self, objective: TokenCrossEntropy, books: int) -> None:
        self._objective, self._share = objective, 1 / (books + 1)
        self._terms = [f"codebook_{number}" for number in range(1, books + 1)]

    def prepare(self, batch: Batch, *, training: bool = True) -> Batch:
        """As the objective does; counts the labels of each codebook."""
        # (places, codebooks) → labels of each codebook.
        counts = (batch["code_targets"] != IGNORED_LABEL).sum(dim=0).tolist()
        return self._objective.prepare(batch, training=training) | {_COUNTS: counts}

    def tokens(self, batch: Batch) -> BatchTokens:
        """As the objective counts them: places, whatever stands beside their text."""
        return self._objective.tokens(batch)

    def count(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Return the objective's counts, and the labels of each codebook."""
        counts = [sum(each) for each in zip(*(batch[_COUNTS] for batch in batches), strict=True)]
        return {**self._objective.count(batches), **dict(zip(self._terms, counts, strict=True))}

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        """The objective's and the codebooks' sums, times the share of a head."""
        seen: list[Any] = []
        # The cross-entropy calls the model and takes its logits; its other outputs are caught here.
        hook = model.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
        try:
            terms = self._objective.terms(model, batch)
        finally:
            hook.remove()
        terms = {name: term * self._share for name, term in terms.items()}
        logits_MGC, targets_MG = output_of(seen[-1], "code_logits"), batch["code_targets"]
        for number, name in enumerate(self._terms):
            loss = whole_cross_entropy(logits_MGC[:, number], targets_MG[:, number]).loss  # it leaves out IGNORED_LABEL
            terms[name] = self._share * loss
        return terms

    def describe(self) -> str:
        """Return a phrase for the log: the objective's own, and the heads of codebooks."""
        return f"{self._objective.describe()}; {len(self._terms)} codebooks by heads of their own, all heads alike"
