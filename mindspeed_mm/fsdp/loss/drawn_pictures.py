"""Pictures as answers that have codes and a head of their own (arXiv:2410.13848): two loss terms, each with a
denominator of its own.

    loss = Σ w_t · (−log p(word_t | before)) / Σ w_t,  picture = Σ w_m · (−log p(code_m | before)) / Σ w_m

over labelled words, and over the codes of pictures in trained turns. Shapes: B rows of L tokens, N pictures, M codes of
drawn ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from mindspeed_mm.core.batch import IGNORED_LABEL, Batch
from mindspeed_mm.fsdp.loss.head_loss import output_of
from mindspeed_mm.fsdp.loss.objectives import BatchTokens, Terms, TokenCrossEntropy
from mindspeed_mm.fsdp.ops.linear_cross_entropy import whole_cross_entropy
from mindspeed_mm.fsdp.utils.model_parts import attribute_at

PICTURE_TERM = "picture"
"""The loss of drawn pictures, beside that of words."""
_WEIGHTS = "_code_weights"


def draws_pictures(model: nn.Module) -> bool:
    """Whether a model has codes of pictures: it takes `drawn_pixel_values` and `drawn_places`, and returns
    `code_logits` and `code_targets`."""
    return bool(attribute_at(model, "draws_pictures", False))


class WithDrawnPictures:
    """Next-token cross-entropy of words, with that of codes beside it.

    Args:
        objective: Of the words.
        placeholder: The token that stands for each place of a picture.
    """

    term = PICTURE_TERM

    def __init__(self, objective: TokenCrossEntropy, placeholder: int) -> None:
        self._objective, self._placeholder = objective, placeholder

    def prepare(self, batch: Batch, *, training: bool = True) -> Batch:
        """As the objective of words, to which places of pictures are not trained; adds where drawn pictures have their
        codes, and how much each counts."""
        labels_BL = batch["shift_labels"]
        is_code_BL = labels_BL == self._placeholder
        words = batch | {"shift_labels": labels_BL.masked_fill(is_code_BL, IGNORED_LABEL)}
        is_drawn_N = words.pop("drawn_images", None)
        prepared = self._objective.prepare(words, training=training)
        if is_drawn_N is None:
            return prepared
        places_T = (batch["input_ids"] == self._placeholder).flatten().nonzero().squeeze(1)
        # (pictures, codes of one): each picture has as many places.
        places_M = places_T.view(len(is_drawn_N), -1)[is_drawn_N].flatten()
        weights = is_code_BL.double()
        if "loss_weights" in batch:
            weights = weights * batch["loss_weights"].double()
        weights_M = weights.flatten().index_select(0, places_M - 1)  # shifted, as labels are
        return prepared | {"drawn_places": places_M, _WEIGHTS: weights_M, "_code_sum": float(weights_M.sum())}

    def tokens(self, batch: Batch) -> BatchTokens:
        """As the objective counts them, and the codes that are trained."""
        words = self._objective.tokens(batch)
        if _WEIGHTS not in batch:
            return words
        return BatchTokens(words.real, words.trained + int((batch[_WEIGHTS] != 0).sum()))

    def count(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Return the objective's counts, and the weights of all codes."""
        return {**self._objective.count(batches), self.term: sum(batch.get("_code_sum", 0.0) for batch in batches)}

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        """The objective's sums, and that over codes."""
        seen: list[Any] = []
        # The cross-entropy calls the model and takes its logits; its other outputs are caught here.
        hook = model.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
        try:
            terms = self._objective.terms(model, batch)
        finally:
            hook.remove()
        if _WEIGHTS not in batch:
            # Ranks sum their terms over one list of names: this one may not be missing.
            return terms | {self.term: terms[self._objective.term].new_zeros(())}
        logits_MV, targets_M = output_of(seen[-1], "code_logits"), output_of(seen[-1], "code_targets")
        return terms | {self.term: whole_cross_entropy(logits_MV, targets_M, batch[_WEIGHTS]).loss}

    def describe(self) -> str:
        """Return a phrase for the log: the objective's own, and that codes of pictures have a term."""
        return f"{self._objective.describe()}; codes of drawn pictures by their own head"
