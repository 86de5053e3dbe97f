"""Weights of which only the rows of new tokens are trained: the gradient of all other rows is removed as soon as it is
whole, before its norm is taken. AdamW leaves a row with zero gradients and without weight decay as it is, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn

from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.local_shard import local_pieces
from mindspeed_mm.fsdp.models.structure.share import first_names, whole_of
from mindspeed_mm.fsdp.optimizer.shards import local


def train_rows_only(model: nn.Module) -> None:
    """From now on let only the new rows of a model with adapters have gradients.

    Args:
        model: Under any plan, its parameters off the meta device.
    """
    lora = facts_of(whole_of(model)).lora
    if lora is None or not lora.token_rows:
        return
    copies = first_names(model)
    for name, parameter in model.named_parameters():
        rows = lora.token_rows.get(copies.get(name, name))
        if rows is not None:
            own = torch.tensor(_own_rows(parameter, rows), dtype=torch.long, device=local(parameter).device)
            # FSDP2 calls it when the gradient is summed over ranks, autograd where nothing is sharded.
            parameter.register_post_accumulate_grad_hook(partial(_keep_rows, own))


def _own_rows(parameter: torch.Tensor, rows: Iterable[int]) -> Sequence[int]:
    """Positions of rows of the full tensor in this rank's part."""
    found: set[int] = set()
    whole = local(parameter)
    for piece, (region, *_) in local_pieces(parameter):
        start, length = region
        offset = (piece.storage_offset() - whole.storage_offset()) // whole.stride(0) if piece.numel() else 0
        found.update(row - start + offset for row in rows if start <= row < start + length)
    return sorted(found)


@torch.no_grad()
def _keep_rows(rows: torch.Tensor, parameter: torch.Tensor) -> None:
    if parameter.grad is None:
        return
    gradient = local(parameter.grad)
    kept = gradient[rows]
    gradient.zero_()
    gradient[rows] = kept
