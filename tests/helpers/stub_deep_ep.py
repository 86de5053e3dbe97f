"""`deep_ep` on a CPU: the signatures of `Buffer` of release 1.2.1, its rules on types and memory, and its results, sent
by torch's own collectives. What it is asked for against these rules fails."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

ROWS = torch.bfloat16
"""What rows must be; a test of exact numbers sets another type."""


class Config:
    """Sizes of a buffer."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Handle(NamedTuple):
    """Of a dispatch."""

    tokens: int
    sent: list[torch.Tensor]
    """Which of this rank's tokens went to each rank."""
    received: list[int]
    """How many came from each."""


class Buffer:
    """Argument names and defaults are those of the release; kernels' settings and events are left out."""

    made = 0

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group, self.group_size, self.row_bytes = group, group.size(), num_nvl_bytes // group.size()
        self._layout: Any = None
        type(self).made += 1

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8)
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, previous_event: Any = None) -> Any:
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous() and bool((topk_idx < num_experts).all())
        own = num_experts // self.group_size
        owners = torch.where(topk_idx >= 0, topk_idx // own, -1)
        in_rank = torch.stack([(owners == rank).any(dim=1) for rank in range(self.group_size)], dim=1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        self._layout = (topk_idx, in_rank, own)
        return in_rank.sum(dim=0).int(), None, per_expert, in_rank, None

    def dispatch(
        self,
        x: torch.Tensor,
        handle: Handle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
    ) -> Any:
        self._check_rows(x)
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            assert len(x) == handle.tokens
            return self._exchange([x[rows] for rows in handle.sent], handle.received), None, None, None, None, None
        assert num_tokens_per_rank is not None and num_tokens_per_expert is not None and is_token_in_rank is not None
        assert topk_idx is not None and topk_weights is not None
        assert self._layout is not None and self._layout[0] is topk_idx, "the layout is of other choices"
        assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
        own, self._layout = self._layout[2], None
        sent = [is_token_in_rank[:, rank].nonzero().squeeze(1) for rank in range(self.group_size)]
        received = self._counts([len(rows) for rows in sent])
        chosen = []
        for rank, rows in enumerate(sent):
            local = topk_idx[rows] - rank * own
            chosen.append(local.masked_fill((local < 0) | (local >= own), -1))
        chosen_NK = self._exchange(chosen, received)
        weights_NK = self._exchange([topk_weights[rows] for rows in sent], received)
        counts = torch.bincount(chosen_NK[chosen_NK >= 0], minlength=own).tolist()
        rows_NH = self._exchange([x[rows] for rows in sent], received)
        return (
            rows_NH,
            chosen_NK,
            weights_NK.masked_fill(chosen_NK < 0, 0),
            counts,
            Handle(len(x), sent, received),
            None,
        )

    def combine(self, x: torch.Tensor, handle: Handle, topk_weights: torch.Tensor | None = None) -> Any:
        self._check_rows(x)
        assert len(x) == sum(handle.received)
        summed_weights = None
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
            summed_weights = self._back(topk_weights, handle)
        return self._back(x, handle), summed_weights, None

    def _back(self, rows: torch.Tensor, handle: Handle) -> torch.Tensor:
        back = self._exchange(list(rows.split(handle.received)), [len(rows) for rows in handle.sent])
        summed = rows.new_zeros(handle.tokens, rows.shape[1])
        for places, part in zip(handle.sent, back.split([len(rows) for rows in handle.sent]), strict=True):
            summed.index_add_(0, places, part)
        return summed

    def _check_rows(self, x: torch.Tensor) -> None:
        assert x.dtype == ROWS and x.is_contiguous() and x.dim() == 2, (x.dtype, x.shape)
        assert x.shape[1] * x.element_size() <= self.row_bytes, "rows are wider than the buffer"

    def _counts(self, mine: list[int]) -> list[int]:
        received = torch.empty(self.group_size, dtype=torch.long)
        dist.all_to_all_single(received, torch.tensor(mine), group=self.group)
        return received.tolist()

    def _exchange(self, parts: list[torch.Tensor], received: list[int]) -> torch.Tensor:
        rows = torch.cat(parts)
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows, received, [len(part) for part in parts], group=self.group)
        return out


def install() -> None:
    """Let `import deep_ep` find this."""
    module = ModuleType("deep_ep")
    module.Buffer = Buffer  # type: ignore[attr-defined]
    sys.modules["deep_ep"] = module
