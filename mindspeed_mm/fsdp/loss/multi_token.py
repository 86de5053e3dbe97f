"""The losses of heads that look further ahead, as terms beside an objective's own.

    mtp_k = factor / depths · Σ w · (−log p(token_{t+k+1})) / N_k

over labelled tokens whose label lies in the same document; N_k counts those, over the whole step like any denominator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from mindspeed_mm.core.batch import IGNORED_LABEL, Batch
from mindspeed_mm.fsdp.loss.head_loss import HeadLoss
from mindspeed_mm.fsdp.loss.objectives import MICRO_BATCHES, BatchTokens, Terms, TokenCrossEntropy
from mindspeed_mm.fsdp.models.behaviour.multi_token import Pass

KEPT = ("_rows", "_targets", "_weights", "_weight_sum", "_labelled_samples", MICRO_BATCHES)
"""What the objective adds to a batch that it prepares."""


class WithMultiToken:
    """Next-token cross-entropy with that of further tokens beside it. Validation has the first alone.

    Args:
        objective: Next-token cross-entropy.
        head: The loss of the model's output head.
        watching: Enters a watch over the decoder's pass.
        depths: Further tokens.
        factor: `model.mtp_loss_scaling_factor`.
    """

    def __init__(
        self,
        objective: TokenCrossEntropy,
        head: HeadLoss,
        watching: Callable[[], AbstractContextManager[Pass]],
        depths: int,
        factor: float,
    ) -> None:
        self._objective, self._head, self._watching = objective, head, watching
        self._depths, self._scale = range(1, depths + 1), factor / depths

    def prepare(self, batch: Batch, *, training: bool = True) -> Batch:
        """As the objective does, and in training once more for each depth, with its labels."""
        prepared = self._objective.prepare(batch, training=training)
        if not training:
            return prepared
        for depth in self._depths:
            own = self._objective.prepare(further(batch, depth), training=training)
            prepared |= {_key(depth, name): own[name] for name in KEPT if name in own}
        return prepared

    def tokens(self, batch: Batch) -> BatchTokens:
        """As the objective counts them."""
        return self._objective.tokens(batch)

    def count(self, batches: Sequence[Batch]) -> dict[str, float]:
        """The objective's, and of each depth its own."""
        counts = self._objective.count(batches)
        for depth in self._depths:
            own = [_of_depth(batch, depth) for batch in batches if _key(depth, "_rows") in batch]
            if own:
                counts[_term(depth)] = self._objective.count(own)[self._objective.term]
        return counts

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        """The objective's, and factor / depths × the sum of each depth."""
        if _key(1, "_rows") not in batch:
            return self._objective.terms(model, batch)
        with self._watching() as seen:
            terms = self._objective.terms(model, batch)
        hidden = model.mtp(seen.hidden, seen.embeddings, **seen.arguments)  # type: ignore[operator]
        for depth, hidden_BLH in zip(self._depths, hidden, strict=True):
            own = _of_depth(batch, depth)
            loss = self._head(hidden_BLH, own["_rows"], own["_targets"], own.get("_weights"))
            terms[_term(depth)] = self._scale * loss
        return terms

    def describe(self) -> str:
        """Return a phrase for the log: the objective's own, the number of further tokens, and the factor of each."""
        return f"{self._objective.describe()}; {len(self._depths)} further tokens, factor {self._scale:g} each"


def further(batch: Batch, depth: int) -> Batch:
    """A collated batch with the labels (and their weights) of `depth` tokens further on, within each document."""
    labels_BL = batch["shift_labels"]
    inside_BL = _documents(batch)[:, depth:] == _documents(batch)[:, :-depth]
    shifted = torch.full_like(labels_BL, IGNORED_LABEL)
    shifted[:, :-depth] = torch.where(inside_BL, labels_BL[:, depth:], IGNORED_LABEL)
    moved = batch | {"shift_labels": shifted}
    if (weights_BL := batch.get("loss_weights")) is not None:
        moved["loss_weights"] = torch.cat([weights_BL[:, depth:], torch.zeros_like(weights_BL[:, :depth])], dim=1)
    return moved


def _documents(batch: Batch) -> torch.Tensor:
    """(B, L): to which document of its row a token belongs."""
    length = batch["shift_labels"].shape[1]
    borders = batch.get("cu_seq_lens_q")
    if borders is None:
        return torch.zeros(1, length, dtype=torch.long)
    return torch.searchsorted(borders[1:].contiguous(), torch.arange(length, dtype=borders.dtype), right=True)[None]


def _of_depth(batch: Batch, depth: int) -> Batch:
    """What was prepared for a depth, under the objective's own names."""
    return {name: batch[_key(depth, name)] for name in KEPT if _key(depth, name) in batch}


def _key(depth: int, name: str) -> str:
    return f"_mtp{depth}{name}"


def _term(depth: int) -> str:
    return f"mtp_{depth}"
