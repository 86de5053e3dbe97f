"""What draws in InternVL-U: a diffusion transformer of two streams, latents and states of the language model
(arXiv:2603.09877, section 3.1.2).

    velocity = head(noisy latents, noise level | latents of pictures that are given, states)

All tokens of a sample attend to one another; each stream has parameters of its own, and attention an element-wise gate.
Modules are named as the released weights are. Shapes: K samples; I tokens of latents and S states of them all, D their
width, C heads of E numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention import FeedForward
from diffusers.models.transformers.transformer_qwenimage import QwenTimestepProjEmbeddings
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

_EPS, _BASE = 1e-6, 10000.0
TIMESTEPS = 1000.0
"""Noise levels are told times this number."""


@dataclass(frozen=True)
class JointLayout:
    """Where the tokens of a pass stand: layers hold latents of all samples, then states of all samples."""

    latents: list[int]
    """Of each sample, its tokens of latents: of the picture that is drawn, then of those that are given."""
    states: list[int]
    """Of each sample, its states."""
    latents_of: torch.Tensor
    """(I,) the sample of each token of latents."""
    states_of: torch.Tensor
    """(S,) the sample of each state."""
    rotation: torch.Tensor
    """(I + S, E / 2, 2) cosines and sines of the tokens' positions, latents first."""

    @classmethod
    def of(cls, latents: Sequence[int], states: Sequence[int], rotation: torch.Tensor) -> JointLayout:
        """With the samples of tokens."""
        owners = [samples_of(lengths, rotation.device) for lengths in (latents, states)]
        return cls(list(latents), list(states), owners[0], owners[1], rotation)

    def of_samples(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """(1, C, I + S, E) → of each sample (1, C, its tokens, E), its latents first."""
        count = sum(self.latents)
        own, others = tokens[:, :, :count].split(self.latents, 2), tokens[:, :, count:].split(self.states, 2)
        return [torch.cat(pair, dim=2) for pair in zip(own, others, strict=True)]

    def joined(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The inverse of `of_samples`: latents of all samples, then states of all."""
        own, others = [], []
        for piece, latents in zip(pieces, self.latents, strict=True):
            own.append(piece[:, :, :latents])
            others.append(piece[:, :, latents:])
        return torch.cat([*own, *others], dim=2)


def turned(heads: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """RoPE of neighbours: (1, N, C, E), numbers 2i and 2i + 1 of a head turned by angle i of its token."""
    exact = torch.promote_types(heads.dtype, torch.float32)
    first, second = heads.to(exact).unflatten(-1, (-1, 2)).unbind(-1)
    # (1, N, 1, E / 2): the same for each head
    cos, sin = rotation.to(exact)[None, :, None].unbind(-1)
    return torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2).to(heads.dtype)


class GatedJointAttention(nn.Module):
    """Attention of a sample's latents and states, each gated: o ⊙ σ(x W).

    Args:
        heads: C.
        width: E.
    """

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self._width, all_heads = width, heads * width
        for query, key, value in (("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")):
            self.add_module(query, nn.Linear(all_heads, 2 * all_heads))
            self.add_module(key, nn.Linear(all_heads, all_heads))
            self.add_module(value, nn.Linear(all_heads, all_heads))
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            self.add_module(name, Qwen3RMSNorm(width, eps=_EPS))
        self.to_out = nn.ModuleList([nn.Linear(all_heads, all_heads)])
        self.to_add_out = nn.Linear(all_heads, all_heads)

    def _stream(self, tokens: torch.Tensor, linear: str, norm: str) -> tuple[torch.Tensor, ...]:
        """Queries, keys, values (1, N, C, E) and gates (1, N, C · E) of one stream."""
        made = {name: self.get_submodule(linear.format(name))(tokens) for name in "qkv"}
        # Each head's gate stands behind its query, not all gates behind all queries.
        query, gate = made["q"].unflatten(-1, (-1, 2 * self._width)).chunk(2, dim=-1)
        key, value = (made[name].unflatten(-1, (-1, self._width)) for name in "kv")
        query, key = (self.get_submodule(norm.format(name))(each) for name, each in (("q", query), ("k", key)))
        return query.to(value.dtype), key.to(value.dtype), value, gate.flatten(-2)

    def forward(
        self, latents: torch.Tensor, states: torch.Tensor, layout: JointLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(1, I, D) and (1, S, D), modulated; the same comes out.

        Args:
            latents: Tokens of the one stream.
            states: Of the other.
            layout: Where they stand.
        """
        own = self._stream(latents, "to_{}", "norm_{}")
        others = self._stream(states, "add_{}_proj", "norm_added_{}")
        query, key, value = (torch.cat(pair, dim=1) for pair in zip(own[:3], others[:3], strict=True))
        query, key = turned(query, layout.rotation), turned(key, layout.rotation)
        split = [layout.of_samples(each.transpose(1, 2)) for each in (query, key, value)]
        attended = [F.scaled_dot_product_attention(q, k, v) for q, k, v in zip(*split, strict=True)]
        if attended:
            joined = layout.joined(attended).transpose(1, 2).flatten(2)
        else:
            # Of no samples no tokens, made of all three all the same: every parameter has gradients on every rank.
            joined = (query + key + value).flatten(2)
        of_latents, of_states = joined[:, : latents.shape[1]], joined[:, latents.shape[1] :]
        return self.to_out[0](of_latents) * own[3].sigmoid(), self.to_add_out(of_states) * others[3].sigmoid()


class InternVLUTransformerBlock(GradientCheckpointingLayer):
    """One block of both streams.

    Args:
        heads: C.
        width: E.
    """

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        whole = heads * width
        self.attn = GatedJointAttention(heads, width)
        for stream in ("img", "txt"):
            self.add_module(f"{stream}_mod", nn.Sequential(nn.SiLU(), nn.Linear(whole, 6 * whole)))
            self.add_module(f"{stream}_mlp", FeedForward(dim=whole, dim_out=whole, activation_fn="gelu-approximate"))

    def forward(
        self, latents: torch.Tensor, states: torch.Tensor, times: torch.Tensor, layout: JointLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(1, I, D) and (1, S, D) → the same.

        Args:
            latents: Of all samples.
            states: Of all samples.
            times: (K, D) embedded noise levels.
            layout: Where the tokens stand.
        """
        streams = {"img": (latents, layout.latents_of), "txt": (states, layout.states_of)}
        changes: dict[str, tuple[torch.Tensor, ...]] = {}
        for name, (_, samples) in streams.items():
            # (K, 6 D) of the samples → six of (1, tokens, D)
            changes[name] = self.get_submodule(f"{name}_mod")(times).index_select(0, samples)[None].chunk(6, dim=-1)
        shown = [_modulated(tokens, *changes[name][:2]) for name, (tokens, _) in streams.items()]
        found = []
        for name, attended in zip(streams, self.attn(*shown, layout), strict=True):
            _, _, gate, shift, scale, last_gate = changes[name]
            tokens = streams[name][0] + gate * attended
            through = self.get_submodule(f"{name}_mlp")(_modulated(tokens, shift, scale))
            found.append(tokens + last_gate * through)
        return found[0], found[1]


def _modulated(tokens: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    exact = torch.promote_types(tokens.dtype, torch.float32)
    normed = F.layer_norm(tokens.to(exact), tokens.shape[-1:], eps=_EPS).to(tokens.dtype)
    return normed * (1 + scale) + shift


def samples_of(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """(tokens,) the number of each token's sample, of samples with so many tokens."""
    counts = torch.tensor(lengths, dtype=torch.long)
    return torch.arange(len(counts)).repeat_interleave(counts).to(device)


class LastNorm(nn.Module):
    """The norm in front of the last layer, whose shift and scale are made of the noise level.

    Args:
        width: D.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, tokens: torch.Tensor, times: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
        """(1, tokens, D), whose samples are (tokens,) of (K, D) embedded noise levels."""
        # The scale comes first here, unlike in the blocks, as in the released weights.
        scale, shift = self.linear(F.silu(times)).index_select(0, samples)[None].chunk(2, dim=-1)
        exact = torch.promote_types(tokens.dtype, torch.float32)
        return _modulated(tokens.to(exact), shift.to(exact), scale.to(exact)).to(tokens.dtype)


class PictureTransformer(nn.Module):
    """`generation_decoder.decoder` of the release.

    Args:
        sizes: `decoder_config`.
    """

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        heads, width = sizes["num_attention_heads"], sizes["attention_head_dim"]
        whole, states = heads * width, sizes["joint_attention_dim"]
        self.time_text_embed = QwenTimestepProjEmbeddings(embedding_dim=whole)
        self.txt_norm = Qwen3RMSNorm(states, eps=_EPS)
        self.img_in, self.txt_in = nn.Linear(sizes["in_channels"], whole), nn.Linear(states, whole)
        self.transformer_blocks = nn.ModuleList(
            InternVLUTransformerBlock(heads, width) for _ in range(sizes["num_layers"])
        )
        self.norm_out = LastNorm(whole)
        self.proj_out = nn.Linear(whole, sizes["patch_size"] ** 2 * sizes["out_channels"])
        self._axes, self._patch = tuple(sizes["axes_dims_rope"]), sizes["patch_size"]

    def forward(
        self,
        latents: torch.Tensor,
        states: torch.Tensor,
        times: torch.Tensor,
        positions: torch.Tensor,
        drawn: Sequence[int],
        latent_lengths: Sequence[int],
        state_lengths: Sequence[int],
    ) -> torch.Tensor:
        """(drawn tokens, p² · channels) velocities: noise minus latents.

        Args:
            latents: (I, p² · channels) tokens, the numbers of each over rows, columns, channels.
            states: (S, states) of the language model.
            times: (K,) noise levels from 0 to 1.
            positions: (I + S, 3), frames, rows and columns, latents of all samples first.
            drawn: Of each sample, how many of its latents are those of the picture that is drawn; they stand first.
            latent_lengths: Of each sample, its latents.
            state_lengths: Of each sample, its states.
        """
        kind = self.img_in.weight.dtype
        tokens = self.img_in(self._released(latents).to(kind))[None]
        others = self.txt_in(self.txt_norm(states.to(kind)).to(kind))[None]
        embedded = self.time_text_embed(times * TIMESTEPS, tokens)
        rotation = _rotation(positions, self._axes)
        layout = JointLayout.of(latent_lengths, state_lengths, rotation)
        for block in self.transformer_blocks:
            tokens, others = block(tokens, others, embedded, layout)
        firsts = [piece[:, :count] for piece, count in zip(tokens.split(layout.latents, 1), drawn, strict=True)]
        kept = tokens
        if firsts:
            kept = torch.cat(firsts, dim=1)
        # States of the last block lead nowhere. They count for nothing here, so that every parameter has gradients.
        made = self.proj_out(self.norm_out(kept, embedded, samples_of(drawn, kept.device))) + 0 * others.sum()
        return self._released(made[0], back=True)

    def _released(self, tokens: torch.Tensor, *, back: bool = False) -> torch.Tensor:
        """The numbers of each token, over rows, columns, channels, in the released order: channels, rows, columns."""
        side = self._patch
        if back:
            return tokens.unflatten(1, (-1, side, side)).permute(0, 2, 3, 1).flatten(1)
        return tokens.unflatten(1, (side, side, -1)).permute(0, 3, 1, 2).flatten(1)


def _rotation(positions: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """(N, E / 2, 2) cosines and sines: of frames, rows and columns in turn."""
    angles = []
    for axis, width in enumerate(axes):
        speeds = 1 / _BASE ** (torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width)
        angles.append(positions[:, axis, None].float() * speeds)
    whole = torch.cat(angles, dim=1)
    return torch.stack([whole.cos(), whole.sin()], dim=-1)
