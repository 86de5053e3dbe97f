"""Sinks by the flash kernel equal softmax over one more key, gradients included. In fp64."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen  # it registers operators by what they are
from torch import Tensor

from mindspeed_mm.fsdp.ops import attention
from mindspeed_mm.fsdp.ops.attention import varlen_attention

CAUSAL = SimpleNamespace(is_causal=True)


class FlashByFormula:
    """Stands in for torch's flash operators, which need an accelerator: their conventions, and the formula."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, dropout: float,
        causal: bool, debug: bool, *, scale: float, window_size_left: int, window_size_right: int,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert cu_q.dtype == cu_k.dtype == torch.int32 and dropout == 0.0 and not debug
        assert causal == ((window_size_left, window_size_right) == (-1, 0))
        scores = self._scores(q, k, cu_q, scale, window_size_left, window_size_right)
        lse_HT = scores.logsumexp(-1)
        weights = (scores - lse_HT[..., None]).exp()
        return torch.einsum("hts,shd->thd", weights, self._whole(v, q)), lse_HT, None, None, None

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_HT: Tensor, cu_q: Tensor, cu_k: Tensor,
        max_q: int, max_k: int, dropout: float, causal: bool, state: Tensor, unused: Tensor, *, scale: float,
        window_size_left: int, window_size_right: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        scores = self._scores(q, k, cu_q, scale, window_size_left, window_size_right)
        weights = (scores - lse_HT[..., None]).exp()
        delta = (grad * out).sum(-1).T[..., None]
        d_scores = weights * (torch.einsum("thd,shd->hts", grad, self._whole(v, q)) - delta) * scale
        of_q = torch.einsum("hts,shd->thd", d_scores, self._whole(k, q))
        of_k, of_v = torch.einsum("hts,thd->shd", d_scores, q), torch.einsum("hts,thd->shd", weights, grad)
        return of_q, *(t.unflatten(1, (k.shape[1], -1)).sum(2) for t in (of_k, of_v))  # type: ignore[return-value]

    def _whole(self, t: Tensor, q: Tensor) -> Tensor:
        return t.repeat_interleave(q.shape[1] // t.shape[1], dim=1)

    def _scores(self, q: Tensor, k: Tensor, borders: Tensor, scale: float, before: int, behind: int) -> Tensor:
        place = torch.arange(len(q))
        document = torch.bucketize(place, borders[1:], right=True)
        distance = place[:, None] - place[None]
        seen = document[:, None] == document[None]
        seen &= (distance <= before) | (before < 0)
        seen &= (-distance <= behind) | (behind < 0)
        return (torch.einsum("thd,shd->hts", q, self._whole(k, q)) * scale).masked_fill(~seen, float("-inf"))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kernel = FlashByFormula()
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", kernel.forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", kernel.backward)
    yield


def inputs(rows: int, tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = ((rows, 4, tokens, 6), (rows, 2, tokens, 6), (rows, 2, tokens, 6), (4,))
    return [torch.randn(*s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_equals_one_more_key(packed: bool, causal: bool, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, sinks = given = inputs(1 if packed else 2, 11)
    options: dict[str, Any] = {"is_causal": causal, "sliding_window": window, "s_aux": sinks, "scaling": 0.3}
    if packed:
        borders = torch.tensor([0, 5, 6, 11])
        options |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 5, "max_length_k": 5}
    expected, _ = varlen_attention(CAUSAL, q, k, v, None, **options)  # type: ignore[arg-type]
    monkeypatch.setattr(attention._Layer, "fits_flash", lambda *_: True)
    found, _ = varlen_attention(CAUSAL, q, k, v, None, **options)  # type: ignore[arg-type]
    assert "WithSinks" in str(found.grad_fn.next_functions)  # type: ignore[union-attr]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    seed = torch.randn_like(expected)
    pairs = zip(torch.autograd.grad(found, given, seed), torch.autograd.grad(expected, given, seed), strict=True)
    for gradient, wanted in pairs:
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-12)
