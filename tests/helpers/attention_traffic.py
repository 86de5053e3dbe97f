"""Bytes that one rank sends in a layer of attention over a spread sequence. Pure: what plans are compared by, and what
measurements are held against."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_mm.fsdp.ops.context_attention.layer import share_heads
from mindspeed_mm.fsdp.ops.context_attention.layout import SequenceLayout


@dataclass(frozen=True)
class AttentionSizes:
    """One layer."""

    rows: int
    heads: int
    key_heads: int
    width: int
    """Width of one head."""
    value_bytes: int
    """Bytes of one element of queries, keys and values: 2 in bf16."""
    sum_bytes: int
    """Bytes of one element of a travelling gradient: 4, in fp64 8."""


@dataclass(frozen=True)
class ContextTraffic:
    """Bytes sent by one rank."""

    ring_forward: int
    ring_backward: int
    ulysses_forward: int
    ulysses_backward: int

    @property
    def total(self) -> int:
        """Of forward and backward."""
        return self.ring_forward + self.ring_backward + self.ulysses_forward + self.ulysses_backward


def attention_traffic(
    layout: SequenceLayout, ring_rank: int, ulysses_rank: int, sizes: AttentionSizes
) -> ContextTraffic:
    """What a rank sends in self-attention. Recomputation adds the forward part once more.

    Ring: keys and values of every rank but the next one go on to it, in backward once more together with the sums of
    their gradients. Ulysses: queries, keys and values of the own tokens go to the ranks of their heads, and outputs of
    the own heads to the ranks of their tokens; backward is the mirror image.
    """
    shares = share_heads(sizes.heads, sizes.key_heads, len(layout.pieces[ring_rank]))
    lengths = layout.ring_lengths()
    # A rank never sends on what the next one began with.
    passed_on = sum(lengths) - lengths[(ring_rank + 1) % layout.ring_size]
    kept_home = sum(lengths) - lengths[ring_rank]
    pair = 2 * sizes.rows * len(shares.key[ulysses_rank]) * sizes.width
    keys_forward = pair * passed_on * sizes.value_bytes if layout.ring_size > 1 else 0
    sums = pair * kept_home * sizes.sum_bytes if layout.ring_size > 1 else 0

    own, all_tokens = layout.piece_lengths(ring_rank)[ulysses_rank], lengths[ring_rank]
    number = sizes.rows * sizes.width * sizes.value_bytes
    heads, key_heads = len(shares.query[ulysses_rank]), len(shares.key[ulysses_rank])
    other_heads = sizes.heads - heads
    other_key_heads = sum(map(len, shares.key)) - key_heads
    scattered = number * own * (other_heads + 2 * other_key_heads)
    gathered = number * (all_tokens - own) * heads
    scattered_back = number * (all_tokens - own) * (heads + 2 * key_heads)
    gathered_back = number * own * other_heads
    # With irregular groups keys are repeated after the exchange, and the ring carries the repeated ones.
    if layout.ring_size > 1 and shares.key_of_query(ulysses_rank) is not None and key_heads:
        keys_forward, sums = (part * heads // key_heads for part in (keys_forward, sums))
    return ContextTraffic(keys_forward, keys_forward + sums, scattered + gathered, scattered_back + gathered_back)
