"""What the host knew of an attention mask before it went to the device, so that it need not be read there.

The facts travel with the moved tensor to the model's call; while that runs, whoever makes masks from it can ask.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.ops.forward_stack import Args, Kwargs

_KEY = "attention_mask"
_FACTS = "_mm_facts"


class MaskFacts(NamedTuple):
    """Of a (B, T) mask."""

    shape: torch.Size
    is_right_padded: bool
    """Every row is ones, then zeros."""
    ones: int


_OF_THIS_CALL: ContextVar[MaskFacts | None] = ContextVar("mask_facts", default=None)


def read_facts(mask: torch.Tensor) -> MaskFacts:
    """Those of a mask; the host waits for one that lies on a device."""
    seen = mask.bool()
    padded = seen[:, :1].all() & (seen[:, 1:] <= seen[:, :-1]).all()
    return MaskFacts(mask.shape, bool(padded.item()), int(seen.sum()))


def carry_facts(host: Batch, moved: Batch) -> None:
    """Let a moved batch's mask bring along what the host's says."""
    mask = host.get(_KEY)
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        setattr(moved[_KEY], _FACTS, read_facts(mask))


def mask_facts_of(mask: torch.Tensor) -> MaskFacts | None:
    """What a moved mask brought along."""
    return getattr(mask, _FACTS, None)


def facts_of_this_call(mask: torch.Tensor) -> MaskFacts | None:
    """Facts of the mask that the model was called with, for one that the library made of it."""
    facts = _OF_THIS_CALL.get()
    return facts if facts is not None and facts.shape == mask.shape else None


def tell_facts(model: nn.Module) -> None:
    """Let the facts that came with a mask be found while the model runs on it."""
    model.register_forward_pre_hook(_begin, with_kwargs=True)
    model.register_forward_hook(_end, always_call=True)


def _begin(_model: nn.Module, _args: Args, kwargs: Kwargs) -> None:
    mask = kwargs.get(_KEY)
    _OF_THIS_CALL.set(mask_facts_of(mask) if isinstance(mask, torch.Tensor) else None)


def _end(_model: nn.Module, _args: object, _output: object) -> None:
    _OF_THIS_CALL.set(None)
