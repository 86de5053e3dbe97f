"""The transformer of Open-Sora Plan 1.5 (text to video), which diffusers does not have: stages of blocks that attend to
fewer and fewer tokens, and to more again, with connections between stages of equal sparseness.

Facts: https://github.com/PKU-YuanGroup/Open-Sora-Plan, branches `mmdit` and `mindspeed_mmdit`; MindSpeed-MM,
`models/predictor/dits/sparseu_mmdit.py`. Names of weights are those of the released file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.attention import FeedForward
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import PixArtAlphaTextProjection, TimestepEmbedding, Timesteps
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from mindspeed_mm.fsdp.models.opensoraplan.rotary import Tables, rotary_tables, rotated, sixteenths
from mindspeed_mm.fsdp.models.opensoraplan.transformer_1_3 import FramePatches, frames_of_patches
from mindspeed_mm.fsdp.ops.skiparse import SkiparseSets, joint_skiparse_attention

Streams = tuple[torch.Tensor, torch.Tensor]
"""Tokens of the video, (B, L, width), and of the caption, (B, S, width)."""


class ExactLayerNorm(nn.LayerNorm):
    """Layer norm in fp32 at least, in the type of what it is given."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normed over the last axis, (…, width)."""
        exact = torch.promote_types(hidden_states.dtype, torch.float32)
        weight, bias = self.weight.to(exact), self.bias.to(exact)
        return F.layer_norm(hidden_states.to(exact), self.normalized_shape, weight, bias, self.eps).to(
            hidden_states.dtype
        )


def _modulated(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x * (1 + scale[:, None]) + shift[:, None]).to(x.dtype)


def _added(x: torch.Tensor, gate: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    return (x + gate[:, None] * made).to(x.dtype)


class StreamsNorm(nn.Module):
    """Norms of video and caption, modulated by time and caption; the gates of both."""

    def __init__(self, width: int, conditions: int, eps: float, has_caption: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(conditions, 6 * width)
        self.norm = ExactLayerNorm(width, eps=eps)
        self.norm_enc = ExactLayerNorm(width, eps=eps) if has_caption else None

    def forward(
        self, video: torch.Tensor, caption: torch.Tensor, temb: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(B, L, width), (B, S, width), and gates (B, width) in fp32 at least."""
        made = self.linear(F.silu(temb))
        shift, scale, gate, told_shift, told_scale, told_gate = made.to(
            torch.promote_types(made.dtype, torch.float32)
        ).chunk(6, dim=1)
        if self.norm_enc is not None:
            caption = _modulated(self.norm_enc(caption), told_shift, told_scale)
        return _modulated(self.norm(video), shift, scale), caption, gate, told_gate


class JointSkiparseProcessor:
    """Attention of video and caption together, as a processor of diffusers.

    Args:
        sets: Who attends to whom among the tokens of the video.
    """

    _attention_backend = None

    def __init__(self, sets: SkiparseSets) -> None:
        self.sets = sets

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        image_rotary_emb: Tables,
        attention_mask: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, L, width) of the video, (B, S, width) of the caption; None where nothing reads it.

        Args:
            attn: The layers.
            hidden_states: (B, L, width).
            encoder_hidden_states: (B, S, width).
            image_rotary_emb: Positions of the video's tokens.
            attention_mask: (B, L) bool: False hides a token of the video.
            encoder_attention_mask: (B, S) bool: False hides a token of the caption.
        """
        seen = [layer(hidden_states).unflatten(2, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v)]
        told = [
            layer(encoder_hidden_states).unflatten(2, (attn.heads, -1))
            for layer in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        ]
        widths = sixteenths(seen[0].shape[-1])
        query = rotated(attn.norm_q(seen[0]), image_rotary_emb, widths)
        key = rotated(attn.norm_k(seen[1]), image_rotary_emb, widths)
        caption = (attn.norm_added_q(told[0]), attn.norm_added_k(told[1]), told[2])
        video, of_caption = joint_skiparse_attention(
            query, key, seen[2], caption, self.sets, self._kernel, encoder_attention_mask, attention_mask
        )
        out = attn.to_out[1](attn.to_out[0](video.flatten(2)))
        return out, None if attn.context_pre_only else attn.to_add_out(of_caption.flatten(2))

    def _kernel(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return dispatch_attention_fn(q, k, v, attn_mask=mask, backend=self._attention_backend)


class JointSkiparseBlock(nn.Module):
    """Attention of video and caption together, and projections of both: of one layer, or of one each. Nothing reads the
    caption of the last block."""

    def __init__(
        self,
        width: int,
        heads: int,
        conditions: int,
        activation: str,
        eps: float,
        sets: SkiparseSets,
        has_two: bool,
        is_last: bool,
    ) -> None:
        super().__init__()
        self.is_last = is_last
        self.norm1 = StreamsNorm(width, conditions, eps)
        self.attn1 = Attention(
            query_dim=width,
            heads=heads,
            dim_head=width // heads,
            added_kv_proj_dim=width,
            context_pre_only=is_last,
            qk_norm="rms_norm",
            bias=True,
            eps=eps,
            processor=JointSkiparseProcessor(sets),
        )
        self.norm2 = StreamsNorm(width, conditions, eps, has_caption=not is_last)
        self.ff = FeedForward(width, activation_fn=activation, bias=False)
        self.ff_enc = FeedForward(width, activation_fn=activation, bias=False) if has_two and not is_last else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        image_rotary_emb: Tables,
        attention_mask: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
    ) -> Streams:
        """Both streams. Arguments as of the processor, and `temb` (B, conditions) of time and caption."""
        video, caption = hidden_states, encoder_hidden_states
        seen, told, gate, told_gate = self.norm1(video, caption, temb)
        made, of_caption = self.attn1(
            seen,
            told,
            image_rotary_emb=image_rotary_emb,
            attention_mask=attention_mask,
            encoder_attention_mask=encoder_attention_mask,
        )
        video = _added(video, gate, made)
        if of_caption is not None:
            caption = _added(caption, told_gate, of_caption)
        seen, told, gate, told_gate = self.norm2(video, caption, temb)
        video = _added(video, gate, self.ff(seen))
        if not self.is_last:
            caption = _added(caption, told_gate, (self.ff_enc or self.ff)(told))
        return video, caption


class TimeAndCaption(nn.Module):
    """One vector of a sample: its time and the pooled caption."""

    def __init__(self, width: int, pooled: int) -> None:
        super().__init__()
        self.time_proj = Timesteps(width, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.timestep_embedder = TimestepEmbedding(width, width)
        self.text_embedder = PixArtAlphaTextProjection(pooled, width, act_fn="silu")

    def forward(self, timestep: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """Return the vector of each sample, (B, width)."""
        return self.timestep_embedder(self.time_proj(timestep).to(pooled.dtype)) + self.text_embedder(pooled)


class StageJoint(nn.Linear):
    """A connection between stages, that passes on the later one alone before something is learned."""

    def __init__(self, width: int) -> None:
        super().__init__(2 * width, width)

    def reset_parameters(self) -> None:
        """The identity of the first half of what is given."""
        with torch.no_grad():
            self.weight.zero_().fill_diagonal_(1.0)
            self.bias.zero_()


def _joint(width: int) -> nn.ModuleList:
    """As it is released: behind a place for a norm."""
    return nn.ModuleList([nn.Identity(), StageJoint(width)])


class OpenSoraT2V_v1_5(ModelMixin, ConfigMixin, PeftAdapterMixin):
    """Open-Sora Plan 1.5: text to video. The defaults are the released sizes.

    Args:
        num_attention_heads: Heads.
        attention_head_dim: Width of each, a multiple of 16.
        in_channels: Of latents.
        out_channels: Of the prediction; None: as many.
        num_layers: Blocks of each stage, an odd number of stages.
        sparse_n: Into how many sets tokens are dealt in each stage.
        double_ff: Whether captions have projections of their own.
        patch_size: Latent positions along a side of a token.
        activation_fn: Of the projections in a block.
        norm_eps: Of all norms.
        caption_channels: Width of the text encoder.
        pooled_projection_dim: Width of the pooled caption.
        timestep_embed_dim: Width of the vector of time and caption.
        skip_connection: Whether stages are connected.
    """

    _no_split_modules = ["JointSkiparseBlock"]

    @register_to_config
    def __init__(
        self,
        num_attention_heads: int = 24,
        attention_head_dim: int = 128,
        in_channels: int = 32,
        out_channels: int | None = None,
        num_layers: Sequence[int] = (2, 4, 6, 8, 6, 4, 2),
        sparse_n: Sequence[int] = (1, 2, 4, 8, 4, 2, 1),
        double_ff: bool = True,
        patch_size: int = 2,
        activation_fn: str = "gelu-approximate",
        norm_eps: float = 1e-6,
        caption_channels: int = 2048,
        pooled_projection_dim: int = 1280,
        timestep_embed_dim: int = 1024,
        skip_connection: bool = True,
    ) -> None:
        super().__init__()
        width, stages = num_attention_heads * attention_head_dim, len(num_layers)
        if stages % 2 == 0 or stages != len(sparse_n) or attention_head_dim % 16:
            raise ValueError("num_layers and sparse_n have one odd length, and attention_head_dim is a multiple of 16")
        self.patch_embed = FramePatches(patch_size, in_channels, width)
        self.time_text_embed = TimeAndCaption(timestep_embed_dim, pooled_projection_dim)
        self.caption_projection = nn.Linear(caption_channels, width)
        self.transformer_blocks = nn.ModuleList()
        for stage, (blocks, sets) in enumerate(zip(num_layers, sparse_n, strict=True)):
            made = nn.ModuleList()
            for at in range(blocks):
                is_last = stage == stages - 1 and at == blocks - 1
                dealt = SkiparseSets(sets, in_runs=sets > 1 and at % 2 == 1)
                made.append(
                    JointSkiparseBlock(
                        width,
                        num_attention_heads,
                        timestep_embed_dim,
                        activation_fn,
                        norm_eps,
                        dealt,
                        double_ff,
                        is_last,
                    )
                )
            self.transformer_blocks.append(made)
        joints = stages // 2 if skip_connection else 0
        self.skip_norm_linear = nn.ModuleList(_joint(width) for _ in range(joints))
        self.skip_norm_linear_enc = nn.ModuleList(_joint(width) for _ in range(joints))
        self.norm_final = ExactLayerNorm(width, eps=norm_eps)
        self.norm_out = nn.ModuleDict(
            {"linear": nn.Linear(timestep_embed_dim, 2 * width), "norm": ExactLayerNorm(width, eps=norm_eps)}
        )
        self.proj_out = nn.Linear(width, patch_size**2 * (out_channels or in_channels))

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        pooled_projections: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[torch.Tensor]:
        """The prediction, (B, C, T, H, W).

        Args:
            hidden_states: (B, C, T, H, W) latents.
            timestep: (B,) times, 0..1000.
            encoder_hidden_states: (B, S, D) of captions.
            pooled_projections: (B, D′) of captions.
            attention_mask: (B, T, H, W): 0 for latents that only fill up a batch.
            encoder_attention_mask: (B, S): 0 for padding.
            return_dict: Return the class of diffusers' transformers.
        """
        patch = self.config.patch_size
        grid = (hidden_states.shape[2], hidden_states.shape[3] // patch, hidden_states.shape[4] // patch)
        video, caption = self.patch_embed(hidden_states), self.caption_projection(encoder_hidden_states)
        temb = self.time_text_embed(timestep, pooled_projections)
        tables = rotary_tables(grid, sixteenths(self.config.attention_head_dim), video)
        told = None if encoder_attention_mask is None else encoder_attention_mask.bool()
        if attention_mask is not None:
            of_patches = attention_mask.bool().unflatten(3, (-1, patch)).unflatten(2, (-1, patch))
            attention_mask = of_patches.any(5).any(3).flatten(1)
        kept: list[Streams] = []
        middle = len(self.transformer_blocks) // 2
        for stage, blocks in enumerate(self.transformer_blocks):
            if stage > middle and self.config.skip_connection:
                video, caption = self._joined(stage - middle - 1, (video, caption), kept.pop())
            for block in blocks:
                video, caption = block(video, caption, temb, tables, attention_mask, told)
            if stage < middle:
                kept.append((video, caption))
        exact = torch.promote_types(temb.dtype, torch.float32)
        shift, scale = self.norm_out["linear"](F.silu(temb)).to(exact).chunk(2, dim=1)
        video = _modulated(self.norm_out["norm"](self.norm_final(video)), shift, scale)
        sample = frames_of_patches(self.proj_out(video), grid, patch)
        if return_dict:
            return Transformer2DModelOutput(sample=sample)
        return (sample,)

    def _joined(self, at: int, now: Streams, before: Streams) -> Streams:
        linears: tuple[Any, Any] = (self.skip_norm_linear[at][1], self.skip_norm_linear_enc[at][1])
        video, caption = (
            linear(torch.cat(pair, dim=-1)) for linear, pair in zip(linears, zip(now, before, strict=True), strict=True)
        )
        return video, caption
