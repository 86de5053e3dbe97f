"""One rectangle of attention, by the kernel of the device: output and log-sum-exp forward, and a backward that takes
the output and log-sum-exp of the *whole* row, so that the gradients of all rectangles add up.

Run here: the CPU's kernel and the plain computation. The accelerators' entries follow their makers' schemas.

Shapes: B rows, T queries, S keys, H heads, K key-value heads (K divides H), D head width.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.ops.attention_kernels import EAGER
from mindspeed_mm.fsdp.ops.kernels_in_force import IN_FORCE, need_of

Gradients = tuple[Tensor, Tensor, Tensor]
NEVER = -math.inf
"""Log-sum-exp of a row without a key."""


class BlockKernel(Protocol):
    """Attention of some queries to some keys."""

    def forward(
        self, q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, bias: Tensor | None, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output (B, T, H, D), and log-sum-exp of the scaled scores (B, T, H) in fp32 or fp64.

        Args:
            q_BTHD: Queries.
            k_BSKD: Keys.
            v_BSKD: Values.
            bias: (B, 1, 1, S) in the type of the queries, added to the scores: 0 or −∞ a key.
            causal: T = S, and query t sees the keys up to t.
            scale: Factor on the scores.
        """
        ...

    def backward(
        self,
        grad_BTHD: Tensor,
        q_BTHD: Tensor,
        k_BSKD: Tensor,
        v_BSKD: Tensor,
        out_BTHD: Tensor,
        lse_BTH: Tensor,
        bias: Tensor | None,
        *,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """Gradients of queries, keys and values through this rectangle. `out` and `lse` are those of the whole row."""
        ...


def kernel_for(query: Tensor, value: Tensor, *, masked: bool) -> BlockKernel:
    """The kernel for such tensors on their device: the device's own where it takes them, else the plain computation."""
    need = need_of(query, value, **{"lse": True, "key mask": masked})
    chosen = IN_FORCE.choose(need, query.device.type)
    if chosen.name == "cpu_parts":
        return CpuKernel()
    if chosen.name == "npu_parts":
        return NpuKernel()
    if chosen.name == EAGER:
        return MathKernel()
    return CudaFlashKernel()


class CpuKernel:
    """torch's flash kernel for CPUs: fp64, fp32, bf16 and fp16, fewer key-value heads without repeating them."""

    def forward(
        self, q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, bias: Tensor | None, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Compute output and log-sum-exp; `BlockKernel.forward` documents shapes and arguments."""
        q, k, v = (tensor.transpose(1, 2) for tensor in (q_BTHD, k_BSKD, v_BSKD))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=_expanded(bias, q), scale=scale
        )
        lse = lse.to(torch.promote_types(lse.dtype, torch.float32))
        if bias is not None:  # the kernel says 0 of a row without a key
            lse = lse.masked_fill((bias == NEVER).all(-1), NEVER)
        return out.transpose(1, 2), lse.transpose(1, 2)

    def backward(
        self,
        grad_BTHD: Tensor,
        q_BTHD: Tensor,
        k_BSKD: Tensor,
        v_BSKD: Tensor,
        out_BTHD: Tensor,
        lse_BTH: Tensor,
        bias: Tensor | None,
        *,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """Compute the gradients of queries, keys and values; see `BlockKernel.backward`."""
        lse = _closed(lse_BTH).transpose(1, 2)
        grad, q, k, v, out = (tensor.transpose(1, 2) for tensor in (grad_BTHD, q_BTHD, k_BSKD, v_BSKD, out_BTHD))
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=_expanded(bias, q), scale=scale
        )
        dq, dk, dv = (tensor.transpose(1, 2) for tensor in gradients)
        return dq, dk, dv


class MathKernel:
    """Written out, with the scores in memory: for what no fused kernel takes (fp64 on an accelerator, key masks, values
    of another width than keys)."""

    def forward(
        self, q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, bias: Tensor | None, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Compute output and log-sum-exp; `BlockKernel.forward` documents shapes and arguments."""
        scores = self._scores(q_BTHD, k_BSKD, bias, causal, scale)
        lse_BKGT = scores.logsumexp(-1)
        probabilities = (scores - _closed(lse_BKGT).unsqueeze(-1)).exp()
        out = torch.einsum("bkgts,bskd->btkgd", probabilities, v_BSKD.to(scores.dtype))
        return out.flatten(2, 3).to(q_BTHD.dtype), lse_BKGT.permute(0, 3, 1, 2).flatten(2, 3)

    def backward(
        self,
        grad_BTHD: Tensor,
        q_BTHD: Tensor,
        k_BSKD: Tensor,
        v_BSKD: Tensor,
        out_BTHD: Tensor,
        lse_BTH: Tensor,
        bias: Tensor | None,
        *,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """See `BlockKernel`. With p = exp(s − lse) and δ = Σ grad · out: ds = p (grad · v − δ)."""
        heads = k_BSKD.shape[2]
        scores = self._scores(q_BTHD, k_BSKD, bias, causal, scale)
        exact = scores.dtype
        grad, q, out = (_grouped(tensor, heads).to(exact) for tensor in (grad_BTHD, q_BTHD, out_BTHD))
        lse_BKGT1 = _grouped(_closed(lse_BTH).unsqueeze(-1), heads).permute(0, 2, 3, 1, 4)
        probabilities = (scores - lse_BKGT1).exp()
        delta_BKGT1 = (grad * out).sum(-1, keepdim=True).permute(0, 2, 3, 1, 4)
        d_scores = torch.einsum("btkgd,bskd->bkgts", grad, v_BSKD.to(exact)) - delta_BKGT1
        d_scores = d_scores * probabilities * scale
        dq = torch.einsum("bkgts,bskd->btkgd", d_scores, k_BSKD.to(exact)).flatten(2, 3)
        dk = torch.einsum("bkgts,btkgd->bskd", d_scores, q)
        dv = torch.einsum("bkgts,btkgd->bskd", probabilities, grad)
        return dq.to(q_BTHD.dtype), dk.to(k_BSKD.dtype), dv.to(v_BSKD.dtype)

    def _scores(self, q_BTHD: Tensor, k_BSKD: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
        """(B, K, G, T, S), G heads to a key-value head."""
        exact = torch.promote_types(q_BTHD.dtype, torch.float32)
        q_BTKGD = _grouped(q_BTHD, k_BSKD.shape[2]).to(exact)
        scores = torch.einsum("btkgd,bskd->bkgts", q_BTKGD, k_BSKD.to(exact)) * scale
        if bias is not None:
            scores = scores + bias.to(exact).unsqueeze(1)
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, NEVER)
        return scores


class CudaFlashKernel:
    """The flash kernel in force on CUDA, below torch's operators: FA2, FA3 or FA4. Without a mask."""

    def forward(
        self, q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, bias: Tensor | None, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `BlockKernel`; `bias` is None."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q_BTHD, k_BSKD, v_BSKD, None, None, q_BTHD.shape[1], k_BSKD.shape[1], 0.0, causal, False, scale=scale
        )
        return out, lse.transpose(1, 2)

    def backward(
        self,
        grad_BTHD: Tensor,
        q_BTHD: Tensor,
        k_BSKD: Tensor,
        v_BSKD: Tensor,
        out_BTHD: Tensor,
        lse_BTH: Tensor,
        bias: Tensor | None,
        *,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """See `BlockKernel`; `bias` is None. Without dropout the kernel's random state is not used."""
        unused = torch.zeros(2, dtype=torch.uint64, device=q_BTHD.device)
        lengths = (q_BTHD.shape[1], k_BSKD.shape[1])
        lse = lse_BTH.transpose(1, 2).contiguous()
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad_BTHD, q_BTHD, k_BSKD, v_BSKD, out_BTHD, lse, None, None, *lengths, 0.0, causal, unused, unused,
            scale=scale,
        )  # fmt: skip
        return dq, dk, dv


class NpuKernel:
    """The fused kernel of Ascend's torch_npu. Not run anywhere yet: written by the kernel's documentation.

    It keeps maximum m and sum s of a row, 8 copies each; lse = m + log s. In backward m = lse and s = 1 stand for the
    log-sum-exp of the whole row.
    """

    _LAYOUT = "BSND"
    _COPIES = 8
    _CAUSAL_MODE, _CAUSAL_MASK = 2, 2048
    """`sparse_mode` of a causal mask given once in compressed form, and the side of that mask."""

    def forward(
        self, q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, bias: Tensor | None, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `BlockKernel`; `bias` is None."""
        out, maximum, total, *_ = torch.ops.npu.npu_fusion_attention(
            q_BTHD, k_BSKD, v_BSKD, q_BTHD.shape[2], self._LAYOUT, scale=scale, keep_prob=1.0,
            **self._mask(causal, q_BTHD.device),
        )  # fmt: skip
        lse_BHT = maximum[..., 0] + total[..., 0].log()
        return out, lse_BHT.transpose(1, 2)

    def backward(
        self,
        grad_BTHD: Tensor,
        q_BTHD: Tensor,
        k_BSKD: Tensor,
        v_BSKD: Tensor,
        out_BTHD: Tensor,
        lse_BTH: Tensor,
        bias: Tensor | None,
        *,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """See `BlockKernel`; `bias` is None."""
        maximum = lse_BTH.transpose(1, 2).unsqueeze(-1).expand(-1, -1, -1, self._COPIES).contiguous()
        dq, dk, dv, *_ = torch.ops.npu.npu_fusion_attention_grad(
            q_BTHD, k_BSKD, v_BSKD, grad_BTHD, q_BTHD.shape[2], self._LAYOUT,
            softmax_max=maximum, softmax_sum=torch.ones_like(maximum), softmax_in=None, attention_in=out_BTHD,
            scale_value=scale, keep_prob=1.0, **self._mask(causal, q_BTHD.device),
        )  # fmt: skip
        return dq, dk, dv

    def _mask(self, causal: bool, device: torch.device) -> JsonObject:
        if not causal:
            return {}
        ones = torch.ones(self._CAUSAL_MASK, self._CAUSAL_MASK, dtype=torch.bool, device=device)
        return {"atten_mask": ones.triu(1), "sparse_mode": self._CAUSAL_MODE}


def _expanded(bias: Tensor | None, q_BHTD: Tensor) -> Tensor | None:
    if bias is None:
        return None
    return bias.expand(-1, -1, q_BHTD.shape[2], -1)


def _closed(lse: Tensor) -> Tensor:
    """A row without a key as +∞: every probability exp(s − lse) is then 0, not NaN."""
    return lse.masked_fill(lse == NEVER, math.inf)


def _grouped(x_BTHD: Tensor, heads: int) -> Tensor:
    """(B, T, K, G, D): heads by the key-value head that they read."""
    return x_BTHD.unflatten(2, (heads, x_BTHD.shape[2] // heads))
