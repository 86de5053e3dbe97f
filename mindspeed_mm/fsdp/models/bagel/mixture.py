"""The language model of BAGEL: layers with two sets of parameters, and one attention of all tokens.

Where a sequence is spread over ranks, a rank holds some tokens of each row, and layers, norms and both sets of
parameters work on these alone. Attention goes over ranks: of Ulysses, an all-to-all gives each rank all tokens for some
of the heads; of a ring, and of both, each has its own queries and gathers the keys. Masks are those of whole samples.
Shapes: B rows of L tokens, of which a rank holds t; T = B · t, of which U go through the first set (t is L where
nothing is spread); H of the language model, D of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2MLP,
    Qwen2RMSNorm,
    Qwen2RotaryEmbedding,
    apply_rotary_pos_emb,
)

from mindspeed_mm.fsdp.models.behaviour.part_cache import KeyValues
from mindspeed_mm.fsdp.ops.context_attention.layer import attend_to_whole
from mindspeed_mm.fsdp.ops.context_attention.share import ContextShare
from mindspeed_mm.fsdp.ops.host_values import host_values


@dataclass(frozen=True)
class Samples:
    """The samples of all rows, one behind the other, whole on every rank."""

    documents: list[tuple[int, int]]
    """Their borders in the flattened rows."""
    masks: list[torch.Tensor | None]
    """(l, l) bool of each, True where a token (row) sees another; None: it sees all."""

    @classmethod
    def of_rows(
        cls, part_ids: torch.Tensor, borders_of_row: torch.Tensor | None, share: ContextShare | None
    ) -> Samples:
        """Those of a batch.

        Args:
            part_ids: (B, L), as of `visible`.
            borders_of_row: Where the samples of a packed row begin and end; None: each row is one.
            share: Where rows are spread, it knows their borders.
        """
        rows, length = part_ids.shape
        stops = [0, length]
        if share is not None:
            stops = list(share.layout.borders)
        elif borders_of_row is not None:
            stops = host_values(borders_of_row)
        documents = []
        for row in range(rows):
            documents += [(row * length + start, row * length + stop) for start, stop in pairwise(stops)]
        flat = part_ids.flatten()
        return cls(documents, [visible(flat[start:stop]) for start, stop in documents])

    @cached_property
    def stacked_masks(self) -> torch.Tensor | None:
        """(samples, 1, l, l) of samples that have one length; None: each sees all of its own."""
        given = [mask for mask in self.masks if mask is not None]
        if not given:
            return None
        assert len(given) == len(self.masks)
        return torch.stack(given)[:, None]


@dataclass(frozen=True)
class TokenLayout:
    """Where the tokens of a pass stand. Layers hold them in another order than the sequence: those of the first set of
    parameters in front, so that each set takes one slice."""

    order: torch.Tensor
    """(T,) places in the sequence, of the tokens as layers hold them."""
    inverse: torch.Tensor
    """(T,) where layers hold the tokens of the sequence."""
    first: int
    """U."""
    samples: Samples
    """Whose tokens they are."""
    share: ContextShare | None = None
    """Of a sequence that is spread over ranks; None: all tokens are here."""
    past: KeyValues | None = None
    keeps: bool = False
    """Whether `past` goes on with the keys and values of this pass."""

    def split(self, hidden: torch.Tensor, first: nn.Module, second: nn.Module) -> torch.Tensor:
        """(1, T, …): the tokens of each set through its module. Either may be given none: it gets zero gradients, and
        ranks stay in step."""
        return torch.cat([first(hidden[:, : self.first]), second(hidden[:, self.first :])], dim=1)


def visible(part_ids: torch.Tensor) -> torch.Tensor:
    """(l, l) bool: which tokens (columns) a token (row) of one sample sees.

    Text sees what is before it. The tokens of a picture see each other, too. A noised picture is seen by nobody else.

    Args:
        part_ids: (l,) 0 for text; n > 0 for the tokens and marks of a picture; n < 0 for those of a noised one.
    """
    same = (part_ids[:, None] == part_ids) & (part_ids != 0)
    before = torch.ones(len(part_ids), len(part_ids), dtype=torch.bool, device=part_ids.device).tril()
    return (before | same) & (same | (part_ids >= 0))


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, samples: Samples) -> torch.Tensor:
    """Attention inside each sample: (1, T, heads, D) → (1, T, heads · D).

    Args:
        query: (1, T, heads, D).
        key: (1, T, K, D), K divides the heads; where there is one sample, it may be longer.
        value: As `key`.
        samples: All of them.
    """
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    groups = query.shape[1] // max(1, key.shape[1])  # a rank may hold no head at all
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    if len(samples.documents) == 1:
        return F.scaled_dot_product_attention(query, key, value, samples.masks[0]).transpose(1, 2).flatten(2)
    sizes = [stop - start for start, stop in samples.documents]
    if len(set(sizes)) == 1:  # rows that are padded, pictures of one size: all of them in one call
        query, key, value = (each[0].unflatten(1, (-1, sizes[0])).transpose(0, 1) for each in (query, key, value))
        attended = F.scaled_dot_product_attention(query, key, value, samples.stacked_masks)
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)[None]
    outputs = []
    for q, k, v, mask in zip(*(each.split(sizes, dim=2) for each in (query, key, value)), samples.masks, strict=True):
        outputs.append(F.scaled_dot_product_attention(q, k, v, mask))
    return torch.cat(outputs, dim=2).transpose(1, 2).flatten(2)


def attend_across(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, samples: Samples, share: ContextShare
) -> torch.Tensor:
    """The same over ranks, of own tokens: (1, B · t, heads, D) → (1, B · t, heads · D)."""
    query, key, value = (each.view(-1, len(share.positions), *each.shape[2:]) for each in (query, key, value))
    across = _exchange_heads
    if share.groups.ring_size > 1:
        across = _gather_keys
    return across(query, key, value, samples, share).flatten(0, 1).flatten(1)[None]


def _exchange_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, samples: Samples, share: ContextShare
) -> torch.Tensor:
    """(B, t, heads, D), each rank with all tokens for some of the heads."""

    def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if q.shape[2] == 0:  # more ranks than heads: an empty product keeps this one in the others' backward pass
            return q * k.sum() * v.sum()
        query, key, value = (each.flatten(0, 1)[None] for each in (q, k, v))
        return attend(query, key, value, samples).view(*q.shape[:3], v.shape[-1])

    return attend_to_whole(query, key, value, share.groups, share.layout, whole)


def _gather_keys(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, samples: Samples, share: ContextShare
) -> torch.Tensor:
    """(B, t, heads, D), each rank with its own queries and the keys of all tokens."""
    keys, values = share.gather(torch.cat([key, value], dim=-1), 1, sum_gradients=True).chunk(2, dim=-1)
    groups, layout = share.groups, share.layout
    segments = layout.segments(groups.ring_rank, groups.ulysses_rank)
    outputs = []
    for row in range(len(query)):
        for segment in segments:
            number = row * (len(layout.borders) - 1) + segment.document
            first, last = layout.borders[segment.document : segment.document + 2]
            mask = samples.masks[number]
            assert mask is not None
            # Rows of the own queries, columns of the whole sample.
            own = Samples([(0, segment.stop - segment.start)], [mask[segment.start - first : segment.stop - first]])
            k, v = (each[row : row + 1, first:last] for each in (keys, values))
            outputs.append(attend(query[row : row + 1, slice(*segment.span)], k, v, own))
    return torch.cat(outputs, dim=1).view(*query.shape)


class BagelAttention(nn.Module):
    """Joint attention of all tokens, with projections and norms for each set of parameters.

    Args:
        config: Of Qwen2.
        layer: Its number.
    """

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self._layer, self._head_dim = layer, config.hidden_size // config.num_attention_heads
        width, shared = config.hidden_size, config.num_key_value_heads * self._head_dim
        own = config.num_attention_heads * self._head_dim
        for end in ("", "_moe_gen"):
            for name, features in (("q", own), ("k", shared), ("v", shared)):
                self.add_module(f"{name}_proj{end}", nn.Linear(width, features, bias=True))
            self.add_module(f"o_proj{end}", nn.Linear(own, width, bias=False))
            for name in "qk":
                self.add_module(f"{name}_norm{end}", Qwen2RMSNorm(self._head_dim, eps=config.rms_norm_eps))

    def _both(self, layout: TokenLayout, name: str, hidden: torch.Tensor) -> torch.Tensor:
        return layout.split(hidden, self.get_submodule(name), self.get_submodule(f"{name}_moe_gen"))

    def forward(
        self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], layout: TokenLayout
    ) -> torch.Tensor:
        """(1, T, H) in the order of layers; the same order comes out."""
        query, key, value = (
            self._both(layout, f"{name}_proj", hidden).unflatten(2, (-1, self._head_dim)) for name in "qkv"
        )
        query, key = self._both(layout, "q_norm", query), self._both(layout, "k_norm", key)
        query, key = apply_rotary_pos_emb(query, key, *rotation, unsqueeze_dim=2)
        # Masks count in the order of the sequence; rotation may have widened queries and keys.
        query, key, value = (each.index_select(1, layout.inverse).to(value.dtype) for each in (query, key, value))
        past = layout.past
        if past is not None and self._layer < len(past.layers):
            known_key, known_value = (each.transpose(1, 2) for each in past.layers[self._layer])
            key, value = torch.cat([known_key, key], dim=1), torch.cat([known_value, value], dim=1)
        if past is not None and layout.keeps:
            # Replaces the layer's entry, or appends the first one.
            past.layers[self._layer : self._layer + 1] = [(key.transpose(1, 2), value.transpose(1, 2))]
        if layout.share is not None:
            attended = attend_across(query, key, value, layout.samples, layout.share)
        else:
            attended = attend(query, key, value, layout.samples)
        return self._both(layout, "o_proj", attended.index_select(1, layout.order))


class BagelDecoderLayer(GradientCheckpointingLayer):
    """One layer of the mixture of transformers: both sets of parameters.

    Args:
        config: Of Qwen2.
        layer: Its number.
    """

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.self_attn = BagelAttention(config, layer)
        self.mlp, self.mlp_moe_gen = Qwen2MLP(config), Qwen2MLP(config)
        for name in ("input_layernorm", "post_attention_layernorm"):
            for end in ("", "_moe_gen"):
                self.add_module(f"{name}{end}", Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps))

    def forward(
        self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], layout: TokenLayout
    ) -> torch.Tensor:
        """(1, T, H) in the order of `layout`.

        Args:
            hidden: States.
            rotation: Cosines and sines (1, T, D) of the tokens' positions, in the same order.
            layout: Where tokens stand.
        """
        normed = layout.split(hidden, self.input_layernorm, self.input_layernorm_moe_gen)
        hidden = hidden + self.self_attn(normed, rotation, layout)
        normed = layout.split(hidden, self.post_attention_layernorm, self.post_attention_layernorm_moe_gen)
        return hidden + layout.split(normed, self.mlp, self.mlp_moe_gen)


class BagelTextModel(nn.Module):
    """The language model without its head.

    Args:
        config: Of Qwen2.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(BagelDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm_moe_gen = Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen2RotaryEmbedding(config)

    def forward(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        """(1, T, H) embeddings in the order of the sequence → normed states in the same order.

        Args:
            inputs_embeds: Of all tokens.
            position_ids: (1, T).
            layout: Where tokens stand.
        """
        hidden = inputs_embeds.index_select(1, layout.order)
        rotation = self.rotary_emb(hidden, position_ids.index_select(1, layout.order))
        for layer in self.layers:
            hidden = layer(hidden, rotation, layout)
        return layout.split(hidden, self.norm, self.norm_moe_gen).index_select(1, layout.inverse)


def orders(latent_places: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Of `TokenLayout` its order, inverse and first, for tokens of which these are latents. The device is not waited
    for.

    Args:
        latent_places: (M,).
        tokens: T.
    """
    is_latent = torch.zeros(tokens, dtype=torch.uint8, device=latent_places.device).index_fill(0, latent_places, 1)
    order = is_latent.argsort(stable=True)  # stable: within each set, tokens keep their order
    return order, order.argsort(), tokens - len(latent_places)
