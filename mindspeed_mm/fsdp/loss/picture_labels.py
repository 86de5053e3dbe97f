"""Pictures as answers: labels that stand for the tokens of a picture become these tokens in the forward pass, where the
model turns pictures into tokens (arXiv:2405.09818, arXiv:2408.02657).

They are words of the vocabulary like all others, so that loss, z-loss and denominators are those of words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.loss.objectives import BatchTokens, Terms, TokenCrossEntropy
from mindspeed_mm.fsdp.ops.forward_stack import Args, CallArguments, Kwargs
from mindspeed_mm.fsdp.utils.model_parts import attribute_at


def tells_pictures(model: nn.Module) -> bool:
    """Whether a model says pictures as tokens: it has `picture_tokens(pixel_values)` and `picture_placeholder`."""
    return bool(attribute_at(model, "tells_pictures", False))


class WithPictureLabels:
    """Next-token cross-entropy over words and the tokens of pictures.

    Args:
        objective: Of the words.
    """

    def __init__(self, objective: TokenCrossEntropy) -> None:
        self._objective = objective

    def prepare(self, batch: Batch, *, training: bool = True) -> Batch:
        """Prepare a batch in the same way as the objective of words."""
        return self._objective.prepare(batch, training=training)

    def tokens(self, batch: Batch) -> BatchTokens:
        """As the objective counts them."""
        return self._objective.tokens(batch)

    def count(self, batches: Sequence[Batch]) -> dict[str, float]:
        """The objective's: a token of a picture counts as a word."""
        return self._objective.count(batches)

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        """Return the objective's sums, after labels that stand for pictures have become the pictures' tokens."""

        def say(model: Any, args: Args, kwargs: Kwargs) -> CallArguments:
            pixels = kwargs.pop("pixel_values", None)
            if pixels is None:
                return args, kwargs
            ids_BL = _with_tokens(model, kwargs["input_ids"], pixels)
            _fill(batch["_targets"], batch["_rows"], ids_BL, model.picture_placeholder)
            return args, {**kwargs, "input_ids": ids_BL}

        # Behind the hooks of sharding, which have gathered the encoder when this one runs.
        hook = model.register_forward_pre_hook(say, with_kwargs=True)
        try:
            return self._objective.terms(model, batch)
        finally:
            hook.remove()

    def describe(self) -> str:
        """Return a phrase for the log: the objective's own, and that pictures are answers, too."""
        return f"{self._objective.describe()}; of pictures in answers, too"


def _with_tokens(model: Any, ids_BL: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    """(B, L) with the tokens of pictures in the places of their placeholders."""
    with torch.no_grad():
        tokens = model.picture_tokens(pixels)
    return ids_BL.masked_scatter(ids_BL == model.picture_placeholder, tokens.to(ids_BL.dtype))


def _fill(targets_n: torch.Tensor, rows_n: torch.Tensor, ids_BL: torch.Tensor, placeholder: int) -> None:
    """In place: a row's target is the token behind it. Who computes the loss holds this very tensor."""
    following_T = ids_BL.flatten().roll(-1)
    targets_n.copy_(torch.where(targets_n == placeholder, following_T.index_select(0, rows_n), targets_n))
