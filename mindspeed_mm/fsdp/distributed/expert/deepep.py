"""Tokens to the ranks of their experts by the kernels of DeepEP: each travels once to a rank, whatever number of its
experts are there, and their sum comes back.

The interface is that of `deep_ep.Buffer`, releases 1.2.1 and 2.1.0 of DeepEP: dispatch takes
bf16 rows, int64 choices with -1 for none, and fp32 weights; the gradient of a dispatch is a combine with its handle,
and that of a combine is a dispatch with the same.

T tokens of this rank, K experts a token, N tokens that arrive, L experts of this rank, H hidden features.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from typing_extensions import override

from mindspeed_mm.fsdp.distributed.expert.dispatch import AllToAll, ExpertRanks
from mindspeed_mm.fsdp.ops.experts import ExpertModule, Weights, combine, run_experts, sort_pairs, spread
from mindspeed_mm.fsdp.ops.real_tokens import RealTokens


class DeepEPBuffer:
    """The memory that ranks of a group send through, one for all layers; made when it is first needed.

    Args:
        ranks: The group.
    """

    def __init__(self, ranks: ExpertRanks) -> None:
        self._ranks, self._row_bytes = ranks, 0
        self._buffer: Any = None

    def for_rows(self, rows_TH: torch.Tensor) -> object:
        """The `deep_ep.Buffer`, with room for rows of this width; collective where it must grow."""
        row_bytes = rows_TH.shape[1] * rows_TH.element_size()
        if row_bytes > self._row_bytes:
            kind = importlib.import_module("deep_ep").Buffer
            size, sizes = self._ranks.size, {"nvl": 0, "rdma": 0}
            for config in (kind.get_dispatch_config(size), kind.get_combine_config(size)):
                for way in sizes:
                    hint = getattr(config, f"get_{way}_buffer_size_hint")(row_bytes, size)
                    sizes[way] = max(sizes[way], hint)
            self._buffer = kind(self._ranks.group, sizes["nvl"], sizes["rdma"])
            self._row_bytes = row_bytes
        return self._buffer


class DeepEP(AllToAll):
    """Dispatch and combine of DeepEP.

    Args:
        ranks: Who shares the experts.
        buffer: Of the group.
        real_tokens: Given: padding goes through no expert.
    """

    def __init__(self, ranks: ExpertRanks, buffer: DeepEPBuffer, real_tokens: RealTokens | None = None) -> None:
        super().__init__(ranks, real_tokens)
        self._buffer = buffer

    @override
    def __call__(
        self, module: ExpertModule, hidden_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        experts, own = module.num_experts, module.num_experts // self.ranks.size
        experts_TK, _ = self.without_padding(experts_TK, experts)
        # Choices of padding have the number behind the last expert.
        chosen_TK = experts_TK.masked_fill(experts_TK == experts, -1).to(torch.int64).contiguous()
        buffer, sent = self._buffer.for_rows(hidden_TH), _Sent()
        rows_NH, weights_NK = _Dispatch.apply(  # type: ignore[no-untyped-call]
            hidden_TH, weights_TK.float(), chosen_TK, experts, buffer, sent
        )
        local_NK = sent.chosen_NK.masked_fill(sent.chosen_NK < 0, own)
        pairs = sort_pairs(local_NK, own, number=sum(sent.counts))
        outputs_SH = run_experts(
            module, Weights.of(module), spread(rows_NH, pairs.slots_S, local_NK.shape[1]), pairs.counts_E
        )
        summed_NH = combine(outputs_SH, pairs, weights_NK).to(hidden_TH.dtype)
        whole_TH: torch.Tensor = _Combine.apply(summed_NH, buffer, sent.handle)  # type: ignore[no-untyped-call]
        return whole_TH


class _Sent:
    """What a dispatch tells beside tensors that have gradients."""

    chosen_NK: torch.Tensor
    """Numbers among this rank's experts; -1 where a choice is another rank's."""
    counts: list[int]
    """Pairs of each of this rank's experts; the host knows them."""
    handle: Any


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden_TH: torch.Tensor,
        weights_TK: torch.Tensor,
        chosen_TK: torch.Tensor,
        experts: int,
        buffer: Any,
        sent: _Sent,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        per_rank, per_rdma_rank, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(chosen_TK, experts)
        rows_NH, sent.chosen_NK, weights_NK, sent.counts, sent.handle, _ = buffer.dispatch(
            hidden_TH.contiguous(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=chosen_TK,
            topk_weights=weights_TK.contiguous(),
        )
        ctx.buffer, ctx.handle = buffer, sent.handle
        return rows_NH, weights_NK

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_rows_NH, of_weights_NK = gradients
        of_hidden, of_weights, _ = ctx.buffer.combine(
            of_rows_NH.contiguous(), ctx.handle, topk_weights=of_weights_NK.float().contiguous()
        )
        return of_hidden, of_weights, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, summed_NH: torch.Tensor, buffer: Any, handle: Any) -> torch.Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        whole_TH: torch.Tensor = buffer.combine(summed_NH.contiguous(), handle)[0]
        return whole_TH

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.buffer.dispatch(gradients[0].contiguous(), handle=ctx.handle)[0], None, None
