"""Attention with a sliding window, a block of queries at a time: exact, in time and memory of T · window.

A kernel without a window of its own gets a mask, which has T² entries for the whole row. Here a block of queries meets
the keys that it reaches, whatever the kernel; the backward pass computes each block again, so that nothing but queries,
keys and values is kept for it, as fused kernels do.

Shapes: B rows, H heads, K key-value heads, T query tokens, S key tokens, D head width, Dv width of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

SHORTEST_BLOCK, LONGEST_BLOCK = 256, 1024
"""Queries at a time: as many as the window is long, within these; on a CPU, which launches nothing, the fewest."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Attention of queries, keys and values by a mask (1, 1, t, s), true where a query sees a key, and of sinks."""


def pays_off(keys: int, window: int, device: torch.device) -> bool:
    """Whether blocks beat one mask over the whole row."""
    reach = window + _block_length(window, device)
    if device.type == "cpu":
        return keys > reach
    return keys > 2 * reach


def attend_in_blocks(
    attend: Attend,
    q_BHTD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    sinks_H: torch.Tensor | None,
    window: int,
    *,
    two_way: bool = False,
) -> torch.Tensor:
    """(B, H, T, Dv): a token sees itself and the `window - 1` before it. Queries are those of the last T of the S keys.

    Args:
        attend: What a block is computed by; without dropout, as it is asked twice.
        q_BHTD: Queries.
        k_BKSD: Keys.
        v_BKSD: Values.
        sinks_H: Logits that take part in the softmax; they get gradients.
        window: Tokens.
        two_way: It sees as many behind it, too.
    """
    reach = _Window.of(window, two_way, q_BHTD.device)
    output: torch.Tensor = _InBlocks.apply(attend, reach, q_BHTD, k_BKSD, v_BKSD, sinks_H)
    return output


def window_mask(queries: int, keys: int, window: int, device: torch.device, *, two_way: bool = False) -> torch.Tensor:
    """(1, 1, queries, keys) bool: the last query stands at the last key, and sees it and the `window - 1` before it;
    with `two_way` every query sees as many behind it."""
    place = torch.arange(keys - queries, keys, device=device)
    distance = place[:, None] - torch.arange(keys, device=device)
    least = 1 - window if two_way else 0
    return ((distance >= least) & (distance < window))[None, None]


class _Window(NamedTuple):
    """Of `length` tokens, itself included; those behind a token, too, where it is `two_way`."""

    length: int
    two_way: bool
    block: int
    """Queries at a time."""

    @classmethod
    def of(cls, length: int, two_way: bool, device: torch.device) -> _Window:
        return cls(length, two_way, _block_length(length, device))

    @property
    def behind(self) -> int:
        if self.two_way:
            return self.length - 1
        return 0

    def whole_mask(self, device: torch.device) -> torch.Tensor:
        """Of a block that reaches as far as any."""
        block, before = self.block, self.length - 1
        place = torch.arange(before, before + block, device=device)
        distance = place[:, None] - torch.arange(before + block + self.behind, device=device)
        return ((distance >= -self.behind) & (distance < self.length))[None, None]


class _Reach(NamedTuple):
    """Queries `first` to `end` see keys of `first_key` to `end_key`."""

    first: int
    end: int
    first_key: int
    end_key: int

    def of(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        keys = slice(self.first_key, self.end_key)
        return q[:, :, self.first : self.end], k[:, :, keys], v[:, :, keys]


def _block_length(window: int, device: torch.device) -> int:
    if device.type == "cpu":
        return SHORTEST_BLOCK
    return min(max(window, SHORTEST_BLOCK), LONGEST_BLOCK)


def _reaches(queries: int, keys: int, window: _Window) -> Iterator[_Reach]:
    length, before = window.block, keys - queries
    for first in range(0, queries, length):
        end = min(first + length, queries)
        first_key = max(0, before + first - window.length + 1)
        yield _Reach(first, end, first_key, min(before + end + window.behind, keys))


class _Masks:
    """Masks of the blocks, all cut from one. Not kept: they are cheaper than the memory."""

    def __init__(self, window: _Window, before: int, device: torch.device) -> None:
        self._whole, self._reach, self._before = window.whole_mask(device), window.length - 1, before

    def of(self, block: _Reach) -> torch.Tensor:
        queries, keys = block.end - block.first, block.end_key - block.first_key
        skipped = self._reach - (self._before + block.first - block.first_key)
        return self._whole[:, :, :queries, skipped : skipped + keys]


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        attend: Attend,
        window: _Window,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.attend, ctx.window = attend, window
        ctx.save_for_backward(q, k, v, sinks)
        output, masks = q.new_empty(*q.shape[:3], v.shape[3]), _Masks(window, k.shape[2] - q.shape[2], q.device)
        for block in _reaches(q.shape[2], k.shape[2], window):
            output[:, :, block.first : block.end] = attend(*block.of(q, k, v), masks.of(block), sinks)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, sinks = ctx.saved_tensors
        masks = _Masks(ctx.window, k.shape[2] - q.shape[2], q.device)
        # Keys are seen from several blocks, whose gradients are summed in fp32 as a kernel would.
        wide = torch.promote_types(q.dtype, torch.float32)
        of_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        of_k, of_v = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (k, v))
        of_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=wide)
        for block in _reaches(q.shape[2], k.shape[2], ctx.window):
            leaves = [part.detach().requires_grad_() for part in block.of(q, k, v)]
            asked = leaves if sinks is None else [*leaves, sinks.detach().requires_grad_()]
            with torch.enable_grad():
                output = ctx.attend(*leaves, masks.of(block), asked[3] if len(asked) > 3 else None)
            found = torch.autograd.grad(output, asked, grad[:, :, block.first : block.end])
            keys = slice(block.first_key, block.end_key)
            of_q[:, :, block.first : block.end] = found[0]
            of_k[:, :, keys] += found[1]
            of_v[:, :, keys] += found[2]
            if of_sinks is not None:
                of_sinks += found[3]
        if of_sinks is not None:
            of_sinks = of_sinks.to(sinks.dtype)
        return None, None, of_q, of_k.to(k.dtype), of_v.to(v.dtype), of_sinks
