"""Attention by `npu_fusion_attention` of torch_npu: plain batches, masks, and packed rows with their borders.

Shapes: B rows, H heads, K key-value heads, T query tokens, S key tokens, D head width.
"""

from __future__ import annotations

import torch

from mindspeed_mm.fsdp.ops.attention_kernels import BY_NAME, NPU
from mindspeed_mm.fsdp.ops.kernels_in_force import need_of
from mindspeed_mm.fsdp.ops.windowed_attention import window_mask
from mindspeed_mm.fsdp.utils.device import npu_operator

KEY = "model.attn_implementation"
_BY_MASK, _CAUSAL, _BAND = 0, 3, 4
"""Sparse modes: by the mask; below the diagonal that ends in the lower right corner; from `pre_tockens` before it to
`next_tockens` behind it. The last two take a mask of one size for all."""
_MASK_TOKENS = 2048
_ANY = 2**31 - 1


def fits_npu(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernel takes these."""
    return query.device.type == "npu" and not BY_NAME[NPU].refuses(need_of(query, value))


def attend_npu(
    q_BHTD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    window: int | None,
    two_way: bool = False,
    scale: float,
    dropout: float,
) -> torch.Tensor:
    """(B, H, T, D) of a batch.

    Args:
        q_BHTD: Queries.
        k_BKSD: Keys.
        v_BKSD: Values.
        mask: (B or 1, 1, T, S) booleans, true where a query sees a key; None: by order.
        causal: Without a mask, a token sees only those before it.
        window: How many tokens a causal one sees, itself included.
        two_way: Without an order, it sees as many on either side.
        scale: Factor on the scores.
        dropout: Probability.
    """
    operator = npu_operator("npu_fusion_attention", key=KEY)
    if mask is None and causal and window is not None and window < k_BKSD.shape[2]:
        mask, causal = _hidden(q_BHTD.shape[2], q_BHTD.device, window).logical_not()[None, None], False
    elif mask is None and two_way and window is not None and window < k_BKSD.shape[2]:
        mask = window_mask(q_BHTD.shape[2], k_BKSD.shape[2], window, q_BHTD.device, two_way=True)
    sparse, hidden = _BY_MASK, None if mask is None else mask.logical_not()
    if mask is None and causal:
        sparse, hidden = _CAUSAL, _hidden(_MASK_TOKENS, q_BHTD.device)
    options = {"scale": scale, "keep_prob": 1.0 - dropout, "atten_mask": hidden, "sparse_mode": sparse}
    output: torch.Tensor = operator(q_BHTD, k_BKSD, v_BKSD, q_BHTD.shape[1], "BNSD", **options)[0]
    return output


def attend_npu_documents(
    q_1HTD: torch.Tensor,
    k_1KSD: torch.Tensor,
    v_1KSD: torch.Tensor,
    borders_q: list[int],
    borders_k: list[int],
    *,
    causal: bool,
    window: int | None,
    two_way: bool = False,
    scale: float,
    dropout: float,
) -> torch.Tensor:
    """(1, H, T, D) of a packed row, in one call.

    Args:
        q_1HTD: Queries.
        k_1KSD: Keys.
        v_1KSD: Values.
        borders_q: Of documents, 0 first, T last, on the host: the kernel wants them there.
        borders_k: The same for keys.
        causal: A token sees only those before it in its document.
        window: How many tokens a causal one sees, itself included.
        two_way: Without an order, it sees as many on either side.
        scale: Factor on the scores.
        dropout: Probability.
    """
    operator = npu_operator("npu_fusion_attention", key=KEY)
    rows = [tensor[0].transpose(0, 1) for tensor in (q_1HTD, k_1KSD, v_1KSD)]
    options: dict[str, object] = {"scale": scale, "keep_prob": 1.0 - dropout, "sparse_mode": _BY_MASK}
    if causal:
        options |= {"sparse_mode": _CAUSAL, "pre_tockens": _ANY, "next_tockens": 0}
        options["atten_mask"] = _hidden(_MASK_TOKENS, q_1HTD.device)
    if causal and window is not None:
        options |= {"sparse_mode": _BAND, "pre_tockens": window - 1}
    elif two_way and window is not None:
        options |= {"sparse_mode": _BAND, "pre_tockens": window - 1, "next_tockens": window - 1}
        options["atten_mask"] = _hidden(_MASK_TOKENS, q_1HTD.device)
    ends = {"actual_seq_qlen": tuple(borders_q[1:]), "actual_seq_kvlen": tuple(borders_k[1:])}
    output: torch.Tensor = operator(*rows, q_1HTD.shape[1], "TND", **options, **ends)[0]
    return output.transpose(0, 1)[None]


def _hidden(tokens: int, device: torch.device, window: int | None = None) -> torch.Tensor:
    """(T, T) booleans, true where a causal token does not see."""
    above = torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)
    if window is None:
        return above
    return above | torch.ones_like(above).tril(-window)
