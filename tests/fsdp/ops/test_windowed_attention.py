"""Windows block by block: the formula in fp64, gradients included; no tensor grows with the square of a row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed_mm.fsdp.ops import windowed_attention
from mindspeed_mm.fsdp.ops.attention import varlen_attention

CAUSAL, BOTH_WAYS = SimpleNamespace(is_causal=True), SimpleNamespace(is_causal=False)


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(params=[2, 4])
def short_blocks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(windowed_attention, "SHORTEST_BLOCK", request.param)


def written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Scores, what is not seen, a column of sinks, softmax, values: (B, T, H, Dv)."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    keys, queries = k.shape[2], q.shape[2]
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill((distance < 0) | (distance >= window), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(len(q), -1, queries, 1)], dim=-1)
    return (scores.softmax(-1)[..., :keys] @ v).transpose(1, 2)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(31, 31), (32, 32), (40, 40), (9, 33), (2, 40)])
@pytest.mark.parametrize("window", [1, 2, 3, 5, 11])
def test_blocks_equal_the_formula(window: int, queries: int, keys: int, with_sinks: bool) -> None:
    torch.manual_seed(window)
    q, k, v = (
        torch.randn(2, heads, tokens, width, dtype=torch.float64, requires_grad=True)
        for heads, tokens, width in ((4, queries, 6), (2, keys, 6), (2, keys, 5))
    )
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if with_sinks else None
    inputs = [each for each in (q, k, v, sinks) if each is not None]
    expected = written_out(q, k, v, window, sinks)
    with torch.no_grad():
        assert windowed_attention.pays_off(keys, window, CPU)
    found, _ = varlen_attention(CAUSAL, q, k, v, None, sliding_window=window, s_aux=sinks)  # type: ignore[arg-type]
    assert "InBlocks" in str(found.grad_fn.next_functions) + str(_ancestors(found))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    seed = torch.randn_like(expected)
    pairs = zip(torch.autograd.grad(expected, inputs, seed), torch.autograd.grad(found, inputs, seed), strict=True)
    for wanted, gradient in pairs:
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("tokens", "window"), [(40, 3), (41, 4), (33, 5), (9, 4), (4, 4), (3, 1)])
def test_a_window_to_both_sides_equals_the_formula(tokens: int, window: int, with_sinks: bool) -> None:
    """Packed documents, long ones by blocks, short ones by a mask."""
    torch.manual_seed(window)
    lengths = (tokens, 7)
    q, k, v = (
        torch.randn(1, heads, sum(lengths), width, dtype=torch.float64, requires_grad=True)
        for heads, width in ((4, 6), (2, 6), (2, 5))
    )
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if with_sinks else None
    expected = []
    for one_q, one_k, one_v in zip(*(t.split(lengths, dim=2) for t in (q, k, v)), strict=True):
        one_k, one_v = (t.repeat_interleave(2, dim=1) for t in (one_k, one_v))
        place = torch.arange(one_q.shape[2])
        scores = one_q @ one_k.mT * 6**-0.5
        scores = scores.masked_fill((place[:, None] - place).abs() >= window, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(1, -1, len(place), 1)], dim=-1)
        expected.append((scores.softmax(-1)[..., : len(place)] @ one_v).transpose(1, 2))
    wanted = torch.cat(expected, dim=1)
    borders = torch.tensor([0, tokens, tokens + 7], dtype=torch.int32)
    found, _ = varlen_attention(
        BOTH_WAYS,
        q,
        k,
        v,
        None,
        two_way_window=window,
        s_aux=sinks,
        cu_seq_lens_q=borders,  # type: ignore[arg-type]
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    inputs, seed = [each for each in (q, k, v, sinks) if each is not None], torch.randn_like(wanted)
    pairs = zip(torch.autograd.grad(wanted, inputs, seed), torch.autograd.grad(found, inputs, seed), strict=True)
    for expected_gradient, gradient in pairs:
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-12)


def test_a_cpu_takes_fewer_queries_at_a_time_and_so_blocks_for_shorter_rows() -> None:
    """It launches nothing: at 4,096 tokens and a window of 1,024 that is 0.37 of the time with a mask."""
    assert [windowed_attention.pays_off(keys, 1024, CPU) for keys in (1280, 1281)] == [False, True]
    assert [windowed_attention.pays_off(keys, 1024, CUDA) for keys in (4096, 4097)] == [False, True]


def _ancestors(tensor: torch.Tensor) -> list[Any]:
    """Functions of the graph that a tensor came by."""
    found, waiting = [], [tensor.grad_fn]
    while waiting:
        if (function := waiting.pop()) is not None:
            found.append(function)
            waiting += [before for before, _ in function.next_functions]
    return found


@pytest.mark.usefixtures("short_blocks")
def test_packed_documents_longer_than_a_window_go_by_blocks() -> None:
    torch.manual_seed(0)
    lengths, window = (30, 1, 25, 3), 4
    q, k, v = (torch.randn(1, 2, sum(lengths), 6, dtype=torch.float64) for _ in range(3))
    borders = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    found, _ = varlen_attention(CAUSAL, q, k, v, None, sliding_window=window, cu_seq_lens_q=borders)  # type: ignore[arg-type]
    parts = zip(*(t.split(lengths, dim=2) for t in (q, k, v)), strict=True)
    expected = torch.cat([written_out(*part, window, None) for part in parts], dim=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


class Largest(TorchDispatchMode):
    """Numbers of the largest tensor that any operation returns."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        self.numbers = max([self.numbers, *sizes])
        return result


@pytest.mark.parametrize("with_sinks", [False, True])
def test_nothing_is_as_large_as_the_square_of_a_row(with_sinks: bool) -> None:
    tokens, window = 4096, 32
    q, k, v = (torch.randn(1, 1, tokens, 8, requires_grad=True) for _ in range(3))
    sinks = torch.zeros(1, requires_grad=True) if with_sinks else None
    with Largest() as largest:
        output, _ = varlen_attention(CAUSAL, q, k, v, None, sliding_window=window, s_aux=sinks)  # type: ignore[arg-type]
        output.sum().backward()
    assert largest.numbers <= 2 * windowed_attention.SHORTEST_BLOCK * (windowed_attention.SHORTEST_BLOCK + window)


def test_gradients_of_half_precision_are_summed_in_full() -> None:
    torch.manual_seed(0)
    window, tokens = 300, 1800
    parts = [torch.randn(1, 2, tokens, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    seed = torch.randn(1, tokens, 2, 16, dtype=torch.bfloat16)
    output, _ = varlen_attention(CAUSAL, *parts, None, sliding_window=window)  # type: ignore[arg-type]
    found = torch.autograd.grad(output, parts, seed)
    exact = [part.detach().double().requires_grad_() for part in parts]
    expected = torch.autograd.grad(written_out(*exact, window, None), exact, seed.double())
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert ((one - other).norm() / other.norm()) < 6e-3  # bf16 has 3.9e-3 a number


def test_a_long_window_keeps_one_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows a little longer than the window are computed in one call."""
    monkeypatch.setattr("mindspeed_mm.fsdp.ops.attention.attend_in_blocks", None)
    q = torch.randn(1, 1, 700, 8)
    found, _ = varlen_attention(CAUSAL, q, q, q, None, sliding_window=512)  # type: ignore[arg-type]
    torch.testing.assert_close(found, written_out(q, q, q, 512, None), rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [3, 5])
def test_the_varlen_kernel_takes_windows_of_plain_rows(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    """The kernel needs an accelerator: a stand-in takes its call, row by row, and answers by the formula."""
    from torch.nn.attention import varlen

    calls = []

    def stand_in(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):  # type: ignore[no-untyped-def]
        calls.append((cu_q.tolist(), cu_k.tolist(), max_q, max_k, window_size))
        rows = [
            [t.transpose(0, 1)[None] for t in parts] for parts in zip(*(t.split(7) for t in (q, k, v)), strict=True)
        ]
        return torch.cat([written_out(*row, window_size[0] + 1, None)[0] for row in rows])

    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    q = torch.randn(3, 4, 7, 6, dtype=torch.float64)
    k, v = (torch.randn(3, 2, 7, 6, dtype=torch.float64) for _ in range(2))
    monkeypatch.setattr("mindspeed_mm.fsdp.ops.attention._Layer.fits_flash", lambda *_: True)
    found, _ = varlen_attention(CAUSAL, q, k, v, None, sliding_window=window)  # type: ignore[arg-type]
    torch.testing.assert_close(found, written_out(q, k, v, window, None), rtol=0, atol=1e-12)
    assert calls == [([0, 7, 14, 21], [0, 7, 14, 21], 7, 7, (window - 1, 0))]
