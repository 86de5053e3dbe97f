"""Step-Video's denoising transformer, under the names of its released weights.

Facts: the technical report (arXiv 2502.10248, section 3) and the configurations and modules of the repositories
stepfun-ai/Step-Video-T2V and Step-Video-TI2V. Letters of shapes: B samples, T latent frames, C channels, H and W
positions, L tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.attention import AttentionModuleMixin, FeedForward
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import PixArtAlphaTextProjection, TimestepEmbedding, Timesteps
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import nn

from mindspeed_mm.fsdp.models.diffusion.modulation import modulated

_ROPE_BASE = 10_000.0
_TIME_CHANNELS = 256
_TIME_SCALE = 1000
"""Times and motion scores become features; times are in 0..1 and are counted in thousandths there."""
Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, (1, L, head width) each."""


def rope_widths(head_dim: int) -> tuple[int, int, int]:
    """Features of a head that turn with time, height and width: a half and two quarters, [64, 32, 32] of 128."""
    return head_dim // 2, head_dim // 4, head_dim // 4


def rotary_tables(grid: Sequence[int], head_dim: int, device: torch.device) -> Rotary:
    """Tables of all tokens of a grid, row after row, in fp32.

    Args:
        grid: Tokens along time, height and width.
        head_dim: A multiple of 8.
        device: Of the tables.
    """
    angles: list[torch.Tensor] = []
    for axis, (count, width) in enumerate(zip(grid, rope_widths(head_dim), strict=True)):
        rates = _ROPE_BASE ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
        of_axis = torch.outer(torch.arange(count, device=device, dtype=torch.float32), rates)
        shape = [1, 1, 1, width]
        shape[axis] = count
        angles.append(torch.cat([of_axis, of_axis], dim=-1).view(shape).expand(*grid, -1))
    table = torch.cat(angles, dim=-1).flatten(0, 2).unsqueeze(0)
    return table.cos(), table.sin()


def rotated(states_BLHD: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Queries or keys turned by their positions: each axis has its own features, whose halves are the pairs."""
    cos, sin = (table.unsqueeze(2) for table in rotary)
    turned: list[torch.Tensor] = []
    states = states_BLHD.to(torch.promote_types(states_BLHD.dtype, cos.dtype))
    for part in states.split(rope_widths(states.shape[-1]), dim=-1):
        # Halves of each axis's features turn together, not neighbours.
        first, second = part.chunk(2, dim=-1)
        turned += [-second, first]
    return (states * cos + torch.cat(turned, dim=-1) * sin).to(states_BLHD.dtype)


class StepVideoAttnProcessor:
    """Attends by diffusers' dispatcher, whose kernel is chosen for each model."""

    _attention_backend = None
    _parallel_config = None

    def __call__(
        self,
        attention: nn.Module,
        query_BLHD: torch.Tensor,
        key_BLHD: torch.Tensor,
        value_BLHD: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(B, L, heads × head width). A mask, (B, 1, 1, keys), is true where keys are seen."""
        made = dispatch_attention_fn(
            query_BLHD, key_BLHD, value_BLHD, attn_mask=attention_mask, backend=self._attention_backend
        )
        return made.flatten(2, 3).to(query_BLHD.dtype)


class StepVideoAttention(nn.Module, AttentionModuleMixin):  # type: ignore[misc]
    """Attention whose queries and keys are normalised head by head. Each head's part of `wqkv`, or of `wkv`, holds its
    queries, keys and values one after another.

    Args:
        dim: Width.
        head_dim: Features of a head.
        is_cross: Whether keys and values come from elsewhere.
    """

    _default_processor_cls: ClassVar[Any] = StepVideoAttnProcessor
    _available_processors: ClassVar[list[object]] = [StepVideoAttnProcessor]
    _supports_qkv_fusion = False

    def __init__(self, dim: int, head_dim: int, is_cross: bool) -> None:
        super().__init__()
        self.head_dim, self.is_cross_attention = head_dim, is_cross
        if is_cross:
            self.wq = nn.Linear(dim, dim, bias=False)
            self.wkv = nn.Linear(dim, 2 * dim, bias=False)
        else:
            self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, eps=1e-6)
        self.k_norm = nn.RMSNorm(head_dim, eps=1e-6)
        self.set_processor(StepVideoAttnProcessor())

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        """(B, L, D) of these tokens, which attend to each other or to `encoder_hidden_states`."""
        if encoder_hidden_states is None:
            query, key, value = self._heads(self.wqkv(hidden_states), 3)
        else:
            (query,) = self._heads(self.wq(hidden_states), 1)
            key, value = self._heads(self.wkv(encoder_hidden_states), 2)
        query, key = self.q_norm(query), self.k_norm(key)
        if rotary_emb is not None:
            query, key = rotated(query, rotary_emb), rotated(key, rotary_emb)
        made: torch.Tensor = self.wo(self.processor(self, query, key, value, attention_mask))
        return made

    def _heads(self, projected: torch.Tensor, parts: int) -> tuple[torch.Tensor, ...]:
        """(B, L, heads, head width) of each part."""
        # Heads first, then parts: the release interleaves queries, keys and values head by head.
        return projected.unflatten(-1, (-1, parts * self.head_dim)).chunk(parts, dim=-1)


class StepVideoTransformerBlock(nn.Module):
    """Self-attention, cross-attention to the caption, projections; the first and the last are modulated by the time.

    Args:
        dim: Width.
        head_dim: Features of a head.
    """

    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-5), nn.LayerNorm(dim, eps=1e-5)
        self.attn1 = StepVideoAttention(dim, head_dim, is_cross=False)
        self.attn2 = StepVideoAttention(dim, head_dim, is_cross=True)
        self.ff = FeedForward(dim, activation_fn="gelu-approximate", bias=False)
        self.scale_shift_table = nn.Parameter(torch.randn(6, dim) / dim**0.5)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        attention_mask: torch.Tensor,
        rotary_emb: Rotary,
    ) -> torch.Tensor:
        """(B, L, D) again. `temb` is (B, 6 D): shift, scale and gate of attention, then those of the projections."""
        modulation = self.scale_shift_table + temb.unflatten(-1, (6, -1))
        shift, scale, gate, ff_shift, ff_scale, ff_gate = modulation.chunk(6, dim=1)
        normed = modulated(self.norm1, hidden_states, scale, shift)
        hidden_states = hidden_states + gate * self.attn1(normed, rotary_emb=rotary_emb)
        hidden_states = hidden_states + self.attn2(hidden_states, encoder_hidden_states, attention_mask)
        normed = modulated(self.norm2, hidden_states, ff_scale, ff_shift)
        made: torch.Tensor = hidden_states + ff_gate * self.ff(normed)
        return made


class StepVideoPatchEmbed(nn.Module):
    """Tokens of latents, frame by frame.

    Args:
        patch: Positions along a side of a token.
        channels: Of the latents.
        dim: Width.
    """

    def __init__(self, patch: int, channels: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, kernel_size=patch, stride=patch)

    def forward(self, latents_BTCHW: torch.Tensor) -> torch.Tensor:
        """(B, L, D), frame after frame, row after row."""
        # (B · T, D, rows, columns) → (B · T, rows · columns, D)
        frames = self.proj(latents_BTCHW.flatten(0, 1)).flatten(2).transpose(1, 2)
        return frames.unflatten(0, latents_BTCHW.shape[:2]).flatten(1, 2)


class StepVideoTimes(nn.Module):
    """Features of times, and of how much moves where the model is told.

    Args:
        dim: Width.
        is_told_motion: Whether it is.
    """

    def __init__(self, dim: int, is_told_motion: bool) -> None:
        super().__init__()
        self.time_proj = Timesteps(_TIME_CHANNELS, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.timestep_embedder = TimestepEmbedding(_TIME_CHANNELS, dim)
        self.motion_score_embedder = TimestepEmbedding(_TIME_CHANNELS, dim) if is_told_motion else None

    def forward(self, timestep: torch.Tensor, motion_score: torch.Tensor | None) -> torch.Tensor:
        """(B, D) of times in 0..1, (B,)."""
        dtype = self.timestep_embedder.linear_1.weight.dtype
        made = self.timestep_embedder(self.time_proj(timestep * _TIME_SCALE).to(dtype))
        if self.motion_score_embedder is not None:
            made = made + self.motion_score_embedder(self.time_proj(motion_score).to(dtype))
        return made  # type: ignore[no-any-return]


class StepVideoModulation(nn.Module):
    """What all blocks are modulated by (adaLN-single, arXiv 2310.00426, section 2.3).

    Args:
        dim: Width.
        is_told_motion: Whether it takes a motion score.
    """

    def __init__(self, dim: int, is_told_motion: bool) -> None:
        super().__init__()
        self.emb = StepVideoTimes(dim, is_told_motion)
        self.linear = nn.Linear(dim, 6 * dim)

    def forward(
        self, timestep: torch.Tensor, motion_score: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, 6 D) for blocks, (B, D) for the output."""
        embedded = self.emb(timestep, motion_score)
        return self.linear(nn.functional.silu(embedded)), embedded


class StepVideoModel(ModelMixin, ConfigMixin, PeftAdapterMixin):  # type: ignore[misc]
    """Predicts x − ε of latents at a time in 0..1, which is 0 for noise.

    Args:
        num_attention_heads: Heads.
        attention_head_dim: Features of a head, a multiple of 8.
        in_channels: Channels of the noise.
        out_channels: Channels of what is predicted; None: as many.
        num_layers: Blocks.
        dropout: 0; other values are refused, as are other norms below.
        patch_size: Positions along a side of a token.
        norm_type: `ada_norm_single`.
        norm_elementwise_affine: False.
        norm_eps: Of the norms outside of blocks.
        use_additional_conditions: Whether it is TI2V, which takes a first frame and a motion score.
        caption_channels: Widths of the features by Step-LLM and by Hunyuan's CLIP; of one encoder a number.
        attention_type: Of no effect: how the authors' code attends.

    Raises:
        ValueError: A setting has another value than that of the released models.
    """

    _no_split_modules: ClassVar[list[str]] = ["StepVideoTransformerBlock"]
    _repeated_blocks: ClassVar[list[str]] = ["StepVideoTransformerBlock"]
    _supports_gradient_checkpointing = False
    _tp_plan: ClassVar[dict[str, str]] = {
        f"transformer_blocks.*.{layer}": style
        for style, layers in {
            "colwise": ("attn1.wqkv", "attn2.wq", "attn2.wkv", "ff.net.0.proj"),
            "rowwise": ("attn1.wo", "attn2.wo", "ff.net.2"),
            "replicated_with_grad_allreduce": ("attn1.q_norm", "attn1.k_norm", "attn2.q_norm", "attn2.k_norm"),
        }.items()
        for layer in layers
    }
    # 1.2 % of all parameters, which a rank of eight would otherwise hold whole beside an eighth of the blocks.
    _tp_plan |= {
        "adaln_single.linear": "colwise_gather_output",
        "adaln_single.emb.timestep_embedder.linear_1": "colwise",
        "adaln_single.emb.timestep_embedder.linear_2": "rowwise",
        "adaln_single.emb.motion_score_embedder.linear_1": "colwise",
        "adaln_single.emb.motion_score_embedder.linear_2": "rowwise",
        "caption_projection.linear_1": "colwise",
        "caption_projection.linear_2": "rowwise",
    }

    @register_to_config
    def __init__(
        self,
        num_attention_heads: int = 48,
        attention_head_dim: int = 128,
        in_channels: int = 64,
        out_channels: int | None = 64,
        num_layers: int = 48,
        dropout: float = 0.0,
        patch_size: int = 1,
        norm_type: str = "ada_norm_single",
        norm_elementwise_affine: bool = False,
        norm_eps: float = 1e-6,
        use_additional_conditions: bool = False,
        caption_channels: int | Sequence[int] = (6144, 1024),
        attention_type: str | None = "torch",
    ) -> None:
        super().__init__()
        fixed = {"dropout": (dropout, 0.0), "norm_type": (norm_type, "ada_norm_single")}
        fixed["norm_elementwise_affine"] = (norm_elementwise_affine, False)
        for name, (given, known) in fixed.items():
            if given != known:
                raise ValueError(f"{name} is {given!r}, and Step-Video has {known!r}")
        if attention_head_dim % 8:
            raise ValueError(f"attention_head_dim is {attention_head_dim}, and positions ask for a multiple of 8")
        dim = num_attention_heads * attention_head_dim
        widths = [caption_channels] if isinstance(caption_channels, int) else list(caption_channels)
        inputs = in_channels
        if use_additional_conditions:
            inputs *= 2  # latents of the first frame stand behind those with noise
        self.pos_embed = StepVideoPatchEmbed(patch_size, inputs, dim)
        self.transformer_blocks = nn.ModuleList(
            StepVideoTransformerBlock(dim, attention_head_dim) for _ in range(num_layers)
        )
        self.norm_out = nn.LayerNorm(dim, eps=norm_eps, elementwise_affine=False)
        self.scale_shift_table = nn.Parameter(torch.randn(2, dim) / dim**0.5)
        self.proj_out = nn.Linear(dim, patch_size**2 * (out_channels or in_channels))
        self.adaln_single = StepVideoModulation(dim, use_additional_conditions)
        self.caption_norm = nn.LayerNorm(widths[0], eps=norm_eps, elementwise_affine=False)
        self.caption_projection = PixArtAlphaTextProjection(widths[0], dim)
        self.clip_projection = nn.Linear(widths[1], dim) if len(widths) > 1 else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_attention_mask: torch.Tensor,
        encoder_hidden_states_2: torch.Tensor | None = None,
        condition_hidden_states: torch.Tensor | None = None,
        motion_score: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[torch.Tensor]:
        """Predict x − ε.

        Args:
            hidden_states: (B, T, C, H, W) latents with noise.
            timestep: (B,) in 0..1; 0 is noise.
            encoder_hidden_states: (B, N, 6144) by Step-LLM.
            encoder_attention_mask: (B, N), 1 where these are the caption's own.
            encoder_hidden_states_2: (B, 77, 1024) by Hunyuan's CLIP; they go before the others, and all are seen.
            condition_hidden_states: TI2V: (B, T, C, H, W), the first frame's latents and zeros behind them.
            motion_score: TI2V: (B,).
            return_dict: False: a tuple.
        """
        frames, height, width = (
            hidden_states.shape[1],
            *(side // self.config.patch_size for side in hidden_states.shape[3:]),
        )
        if condition_hidden_states is not None:
            hidden_states = torch.cat([hidden_states, condition_hidden_states], dim=2)
        tokens = self.pos_embed(hidden_states)
        modulation, embedded = self.adaln_single(timestep, motion_score)
        caption = self.caption_projection(self.caption_norm(encoder_hidden_states))
        seen = encoder_attention_mask.bool()
        if self.clip_projection is not None:
            before = self.clip_projection(encoder_hidden_states_2)
            caption = torch.cat([before, caption], dim=1)
            seen = torch.cat([seen.new_ones(before.shape[:2]), seen], dim=1)
        mask = seen[:, None, None]  # (B, 1, 1, keys)
        rotary = rotary_tables((frames, height, width), self.config.attention_head_dim, tokens.device)
        for block in self.transformer_blocks:
            tokens = block(tokens, caption, modulation, mask, rotary)
        shift, scale = (self.scale_shift_table + embedded.unsqueeze(1)).chunk(2, dim=1)
        made = self.proj_out(self.norm_out(tokens) * (1 + scale) + shift)
        output = self._unpatched(made, frames, height, width)
        if return_dict:
            return Transformer2DModelOutput(sample=output)
        return (output,)

    def _unpatched(self, tokens: torch.Tensor, frames: int, height: int, width: int) -> torch.Tensor:
        """(B, T, C, H, W); a token holds rows, columns and channels of its patch."""
        patch = self.config.patch_size
        split = tokens.unflatten(-1, (patch, patch, -1)).unflatten(1, (frames, height, width))
        # (B, T, rows, columns, p, q, C) → (B, T, C, rows, p, columns, q)
        return split.permute(0, 1, 6, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)
