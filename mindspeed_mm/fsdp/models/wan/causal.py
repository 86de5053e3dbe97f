"""Wan that draws clips in blocks of frames: a block sees itself and, through the keys and values that are kept of them,
the finished blocks before (Self-Forcing, arXiv 2506.08009). The weights are those of Wan as it is.

What a block sees goes with the positions into each layer, as an argument: a layer whose forward pass is computed again
for the backward pass sees the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mindspeed_mm.fsdp.ops.forward_stack import forwards_replaced

KeysValues = tuple[torch.Tensor, torch.Tensor]
"""(B, L, heads, D) each, keys at their positions."""


class BlockPositions:
    """Rotations of the tokens of one block, and the blocks that it sees.

    Args:
        cos: (1, L, 1, D), of the block's own frames.
        sin: The same.
        seen: Layer → keys and values of each block before.
        kept: Layer → the same, of which this block's become a part; None: it is not finished.
    """

    def __init__(
        self,
        cos: torch.Tensor,
        sin: torch.Tensor,
        seen: list[tuple[KeysValues, ...]],
        kept: list[tuple[KeysValues, ...]] | None,
    ) -> None:
        self._cos, self._sin, self._seen, self._kept = cos, sin, seen, kept

    def rotated(self, heads_BLHD: torch.Tensor) -> torch.Tensor:
        """Queries or keys at their positions: pairs of numbers are turned, as in Wan's own layers."""
        even, odd = heads_BLHD.unflatten(-1, (-1, 2)).unbind(-1)
        # The tables of diffusers have each angle twice, once for each number of a pair.
        cos, sin = self._cos[..., 0::2], self._sin[..., 1::2]
        turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
        return turned.flatten(-2).type_as(heads_BLHD)

    def before(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
        """All keys and values that a layer's queries see: those of earlier blocks, and its own."""
        seen = [*self._seen[layer], (keys, values)]
        if self._kept is not None:
            self._kept[layer] = tuple(seen)
        return torch.cat([each[0] for each in seen], dim=1), torch.cat([each[1] for each in seen], dim=1)


class BlockAttention:
    """Self-attention of a layer: of a block where it is given `BlockPositions`, else as the layer does it.

    Args:
        plain: The layer's own.
        layer: Its number.
    """

    def __init__(self, plain: Any, layer: int) -> None:
        self.plain, self._layer = plain, layer

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Any = None,
    ) -> torch.Tensor:
        """(B, L, width), as diffusers' processors are called."""
        if not isinstance(rotary_emb, BlockPositions):
            found: torch.Tensor = self.plain(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
            return found
        query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        query, key, value = (each.unflatten(2, (attn.heads, -1)) for each in (query, key, attn.to_v(hidden_states)))
        query, key = rotary_emb.rotated(query), rotary_emb.rotated(key)
        keys, values = rotary_emb.before(self._layer, key, value)
        return _projected(attn, self.plain, query, keys, values)


class TextAttention:
    """Cross-attention of a layer. Keys and values of the captions are computed once for all calls without gradients
    while a batch is drawn.

    Args:
        plain: The layer's own.
    """

    def __init__(self, plain: Any) -> None:
        self.plain = plain
        self.draws = False
        self._kept: KeysValues | None = None

    def opened(self, *, draws: bool) -> None:
        """Begin, or end, the drawing of a batch."""
        self.draws, self._kept = draws, None

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Any = None,
    ) -> torch.Tensor:
        """(B, L, width), as diffusers' processors are called."""
        if not self.draws or torch.is_grad_enabled() or attn.add_k_proj is not None:
            found: torch.Tensor = self.plain(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
            return found
        if self._kept is None:
            key = attn.norm_k(attn.to_k(encoder_hidden_states)).unflatten(2, (attn.heads, -1))
            self._kept = key, attn.to_v(encoder_hidden_states).unflatten(2, (attn.heads, -1))
        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        return _projected(attn, self.plain, query, *self._kept)


class CausalWan:
    """The live transformer as blocks of frames are drawn with it: a `CausalModel`.

    Args:
        model: `WanTransformer3DModel`, sharded or not. Its layers are prepared once; without a block they compute what
            they did before.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self._texts: list[TextAttention] = []
        for layer, block in enumerate(self._model.blocks):
            if not isinstance(block.attn1.processor, BlockAttention):
                block.attn1.processor = BlockAttention(block.attn1.processor, layer)
                block.attn2.processor = TextAttention(block.attn2.processor)
            self._texts.append(block.attn2.processor)
        self._kept: list[tuple[KeysValues, ...]] = []

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Begin to draw a batch: nothing is kept of an earlier one."""
        self._kept = [()] * len(self._texts)
        for text in self._texts:
            text.opened(draws=True)
        try:
            yield
        finally:
            self._kept = []
            for text in self._texts:
                text.opened(draws=False)

    @contextmanager
    def block(self, first_frame: int, *, keeps: bool = False) -> Iterator[None]:
        """See `CausalModel`. A block that is kept comes behind all that are kept already."""
        rope = self._model.rope
        plain, seen = rope.forward, list(self._kept)

        def positions(hidden_states: torch.Tensor) -> BlockPositions:
            B, C, T, H, W = hidden_states.shape
            # Only its shape is read: a clip that ends with this block.
            ahead = hidden_states.new_empty(1).expand(B, C, first_frame + T, H, W)
            cos, sin = plain(ahead)
            own = cos.shape[1] * T // (first_frame + T)  # tokens of the block's own frames, which are the last
            kept = None
            if keeps:
                kept = self._kept
            return BlockPositions(cos[:, -own:], sin[:, -own:], seen, kept)

        with forwards_replaced({rope: positions}):
            yield


def _projected(attn: Any, plain: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """(B, L, width) of attention by the kernel that the layer has."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn  # its library is slow to import

    mixed = dispatch_attention_fn(query, keys, values, backend=plain._attention_backend)
    projected: torch.Tensor = attn.to_out[0](mixed.flatten(2, 3).type_as(query))
    return projected
