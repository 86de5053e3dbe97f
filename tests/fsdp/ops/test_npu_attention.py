"""What `npu_fusion_attention` is called with, by a stand-in that computes what its manual says of the arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.fsdp.ops import attention, npu_attention
from mindspeed_mm.fsdp.ops.attention import varlen_attention

CALLS: list[dict[str, Any]] = []


def operator(q: Any, k: Any, v: Any, heads: int, layout: str, **options: Any) -> tuple[torch.Tensor, None]:
    """Of (B, N, S, D) or, with borders, (T, N, D)."""
    CALLS.append({"layout": layout, "heads": heads, **options})
    if layout == "BNSD":
        return computed(q, k, v, options), None
    ends_q, ends_k = options["actual_seq_qlen"], options["actual_seq_kvlen"]
    parts = []
    for first_q, last_q, first_k, last_k in zip((0, *ends_q), ends_q, (0, *ends_k), ends_k, strict=False):
        rows = (q[first_q:last_q], k[first_k:last_k], v[first_k:last_k])
        parts.append(computed(*(t.transpose(0, 1)[None] for t in rows), options)[0].transpose(0, 1))
    return torch.cat(parts), None


def computed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * options["scale"]
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])[None, :] + k.shape[2] - q.shape[2]
    mode, mask = options["sparse_mode"], options.get("atten_mask")
    if mode == 0:
        hidden = torch.zeros_like(scores, dtype=torch.bool) if mask is None else mask
    else:
        assert mask.shape == (2048, 2048) and torch.equal(mask, torch.ones_like(mask).triu(1))
        reach = options["pre_tockens"] if mode == 4 else 2**31
        hidden = (distance < 0) | (distance > reach)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


class Layer(nn.Module):
    is_causal = True


def qkv(tokens: int, rows: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(rows, heads, tokens, 8, generator=generator).double() for heads in (4, 2, 2)]


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "causal": (0, {}),
    "two-way": (0, {"is_causal": False}),
    "window": (0, {"sliding_window": 3}),
    "mask": (0, {"attention_mask": torch.ones(2, 1, 11, 11, dtype=torch.bool).tril()}),
    "packed": (3, {}),
    "packed, window": (3, {"sliding_window": 3}),
    "packed, two-way": (3, {"is_causal": False}),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    documents, options = CASES[name]
    options = dict(options)
    mask = options.pop("attention_mask", None)
    tensors = qkv(11, rows=1 if documents else 2)
    if documents:
        borders = torch.tensor([0, 5, 6, 11], dtype=torch.int32)
        options |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 5, "max_length_k": 5}
    expected, _ = varlen_attention(Layer(), *tensors, mask, **options)
    CALLS.clear()
    monkeypatch.setattr(attention, "fits_npu", lambda query, value: True)
    monkeypatch.setattr(npu_attention, "npu_operator", lambda name, key: {"npu_fusion_attention": operator}[name])
    found, _ = varlen_attention(Layer(), *tensors, mask, **options)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    (call,) = CALLS
    assert call["layout"] == ("TND" if documents else "BNSD") and call["keep_prob"] == 1.0
    assert not documents or call["actual_seq_qlen"] == (5, 6, 11)


def test_only_half_precision_on_an_npu_goes_there() -> None:
    query, _, value = qkv(3)
    assert not npu_attention.fits_npu(query, value)
    assert not npu_attention.fits_npu(query.bfloat16(), value.bfloat16())  # on a CPU
