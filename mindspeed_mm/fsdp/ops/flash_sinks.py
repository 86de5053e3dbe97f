"""Attention sinks by torch's flash kernel, which knows none: a sink is one more key, with a value of zero.

The kernel's log-sum-exp l of a row becomes that with the sink's logit s, m = log(eˡ + eˢ), and its output shrinks by
e^(l − m). With output and log-sum-exp of the whole row, its backward pass gives the gradients of queries, keys and
values, as on a ring; that of the sink is −Σ e^(s − m) · (grad · out).

Shapes: T tokens of all documents, H heads, K key-value heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_mm.fsdp.ops.host_values import outside_graphs

Lengths = tuple[Tensor, Tensor, int, int]
"""Borders of documents in queries and in keys, int32, and the longest of each."""


@outside_graphs
def flash_with_sinks(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    sinks_H: Tensor,
    lengths: Lengths,
    window: tuple[int, int],
    scale: float,
) -> Tensor:
    """(T, H, D) of documents that stand one behind the other.

    Args:
        q_THD: Queries, in bf16 or fp16 on CUDA.
        k_TKD: Keys; K divides H.
        v_TKD: Values.
        sinks_H: Learned logits; they get gradients.
        lengths: Of the documents.
        window: Tokens before and behind that are seen; -1 is all of them.
        scale: Factor on the scores.
    """
    output: Tensor = _WithSinks.apply(q_THD, k_TKD, v_TKD, sinks_H, lengths, window, scale)
    return output


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        lengths: Lengths,
        window: tuple[int, int],
        scale: float,
    ) -> Tensor:
        ctx.options = {"scale": scale, "window_size_left": window[0], "window_size_right": window[1]}
        ctx.causal, ctx.longest = window == (-1, 0), lengths[2:]
        out, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *lengths, 0.0, ctx.causal, False, **ctx.options
        )
        whole_HT = torch.logaddexp(lse_HT, sinks.to(lse_HT.dtype)[:, None])
        out = (out * (lse_HT - whole_HT).exp().T[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, whole_HT, *lengths[:2])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse_HT, *borders = ctx.saved_tensors
        grad = gradients[0].contiguous()
        # Without dropout the kernel's random state is not used.
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
        of_q, of_k, of_v = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse_HT, *borders, *ctx.longest, 0.0, ctx.causal, unused, unused, **ctx.options
        )
        delta_HT = (grad.to(lse_HT.dtype) * out.to(lse_HT.dtype)).sum(-1).T
        weight_HT = (sinks.to(lse_HT.dtype)[:, None] - lse_HT).exp()
        of_sinks = -(weight_HT * delta_HT).sum(-1).to(sinks.dtype)
        return of_q, of_k, of_v, of_sinks, None, None, None
