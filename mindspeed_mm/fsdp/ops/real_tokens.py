"""Which tokens of the micro-batch in flight are not padding, for modules that see hidden states only."""

from __future__ import annotations

import torch
from torch import nn

from mindspeed_mm.fsdp.ops.attention import PADDING_KEY
from mindspeed_mm.fsdp.ops.context_attention.share import CONTEXT_KEY, ContextShare
from mindspeed_mm.fsdp.ops.forward_stack import Args, Kwargs
from mindspeed_mm.fsdp.ops.host_values import mask_facts_of


class RealTokens:
    """Remembers the mask that the model was last called with. It stays until the next call, or until a layer of an
    earlier call is computed again: several micro-batches may be under way.

    Args:
        models: Called with `attention_mask` (B, L), 1 for tokens and 0 for padding; with a packed row (1, T) and
            `pad_tokens`, how many at its end are padding; or with rows that have none.
    """

    def __init__(self, *models: nn.Module) -> None:
        self._mask_T: torch.Tensor | None = None
        self.number: int | None = None
        """How many tokens of `mask` are not padding, where the host knows."""
        for model in models:
            model.register_forward_pre_hook(self._look, with_kwargs=True)

    @property
    def of_this_call(self) -> tuple[torch.Tensor | None, int | None]:
        """What is remembered, to be set again when a layer of this call is computed once more."""
        return self._mask_T, self.number

    @of_this_call.setter
    def of_this_call(self, remembered: tuple[torch.Tensor | None, int | None]) -> None:
        self._mask_T, self.number = remembered

    def mask(self, tokens: int) -> torch.Tensor | None:
        """(T,) booleans in the order of hidden states (B × L, H); None when no token is padding, or when a module works
        on other tokens than the model was called with.

        Args:
            tokens: How many hidden states there are.
        """
        if self._mask_T is None or self._mask_T.numel() != tokens:
            return None
        return self._mask_T

    def _look(self, _model: nn.Module, _args: Args, kwargs: Kwargs) -> None:
        mask = _mask_of(kwargs)
        self._mask_T = self.number = None
        if mask is None:
            return
        share = kwargs.get(CONTEXT_KEY)
        if isinstance(share, ContextShare):  # how many of the own tokens are padding is not known to the host
            self._mask_T = share.take(mask, 1).reshape(-1) != 0
            return
        self._mask_T = mask.reshape(-1) != 0
        facts, padding = mask_facts_of(mask), kwargs.get(PADDING_KEY, 0)
        if padding:
            self.number = mask.numel() - padding
        elif facts is not None:
            self.number = facts.ones


def _mask_of(kwargs: Kwargs) -> torch.Tensor | None:
    """(B, L) of a call; None where nothing is padding."""
    mask, padding = kwargs.get("attention_mask"), kwargs.get(PADDING_KEY, 0)
    if padding:
        ids = kwargs["input_ids"]
        return (torch.arange(ids.shape[1], device=ids.device) < ids.shape[1] - padding)[None]
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return mask
    return None
