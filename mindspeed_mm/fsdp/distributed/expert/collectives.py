"""The collectives of expert parallelism, each with the gradient that belongs to it.

Ranks of an expert group hold different tokens and different experts. Rows go to the rank that has their expert and come
back; gradients take the same way in the other direction.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mindspeed_mm.fsdp.distributed.collectives import AxisRanks, all_gather_single, reduce_scatter_single, with_gradient


class ExpertRanks(AxisRanks):
    """The ranks that share the experts of a layer with this one (axis `ep`)."""


def gather_rows(rows_R: torch.Tensor, ranks: ExpertRanks) -> torch.Tensor:
    """(R, …) → (ranks × R, …), the same R on every rank; each uses them for its own experts: gradients are summed."""
    return with_gradient(rows_R, ranks, gather, _sum_of_own)


def sum_of_own_rows(rows_RR: torch.Tensor, ranks: ExpertRanks) -> torch.Tensor:
    """(ranks × R, …) → (R, …): the sum over ranks, of this rank's rows."""
    return with_gradient(rows_RR, ranks, _sum_of_own, gather)


def exchange_counts(counts_RL: torch.Tensor, ranks: ExpertRanks) -> torch.Tensor:
    """(ranks, L) numbers, a line for each rank → (ranks, L) of which line r came from rank r."""
    received = torch.empty_like(counts_RL)
    dist.all_to_all_single(received, counts_RL.contiguous(), group=ranks.group)
    return received


def gather(rows: torch.Tensor, ranks: ExpertRanks) -> torch.Tensor:
    """(R, …) → (ranks × R, …), without a gradient."""
    whole = rows.new_empty(ranks.size * rows.shape[0], *rows.shape[1:])
    all_gather_single(whole, rows.contiguous(), group=ranks.group)
    return whole


def fill_up(rows: torch.Tensor, length: int, value: float = 0) -> torch.Tensor:
    """Rows (R, K) with more behind them, of that value, until there are `length`."""
    return F.pad(rows, (0, 0, 0, length - len(rows)), value=value)


def _sum_of_own(rows: torch.Tensor, ranks: ExpertRanks) -> torch.Tensor:
    own = rows.new_empty(rows.shape[0] // ranks.size, *rows.shape[1:])
    reduce_scatter_single(own, rows.contiguous(), group=ranks.group)
    return own
