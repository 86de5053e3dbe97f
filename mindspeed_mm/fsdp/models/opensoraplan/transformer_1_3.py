"""The transformers of Open-Sora Plan 1.3 (text to video, and from given frames), which diffusers does not have.

Facts: https://github.com/PKU-YuanGroup/Open-Sora-Plan, `opensora/models/diffusion/opensora_v1_3`. Names of weights and
settings are the released ones.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.attention import FeedForward
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import PixArtAlphaTextProjection
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.normalization import AdaLayerNormSingle
from torch import nn

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.models.diffusion.modulation import modulated
from mindspeed_mm.fsdp.models.opensoraplan.rotary import Tables, rotary_tables, rotated, thirds
from mindspeed_mm.fsdp.ops.skiparse import SkiparseSets, skiparse_attention

_EVERY = SkiparseSets(1)
_FIRST_SPARSE, _AFTER_SPARSE = 2, 30
"""The blocks with sparse attention, whatever their number is."""
_UNBUILT = {
    "dropout": 0.0, "only_cross_attention": False, "double_self_attention": False, "upcast_attention": False,
    "norm_elementwise_affine": False, "patch_size_t": 1, "attention_bias": True,
}  # fmt: skip
"""Settings that released configurations have, each with one value."""


class SkiparseProcessor:
    """Attention as a processor of diffusers: of video tokens to their set, or to a caption.

    Args:
        sets: Who attends to whom among the tokens of the video.
    """

    _attention_backend = None

    def __init__(self, sets: SkiparseSets = _EVERY) -> None:
        self.sets = sets

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Tables | None = None,
    ) -> torch.Tensor:
        """(B, L, width) of the tokens.

        Args:
            attn: The layers.
            hidden_states: (B, L, width).
            encoder_hidden_states: (B, S, width) of a caption; None: the tokens themselves.
            attention_mask: (B, S or L) bool: False hides a key.
            image_rotary_emb: Positions of the tokens.
        """
        source = encoder_hidden_states
        if source is None:
            source = hidden_states
        # (B, L, heads, head width)
        query = attn.to_q(hidden_states).unflatten(2, (attn.heads, -1))
        key = attn.to_k(source).unflatten(2, (attn.heads, -1))
        value = attn.to_v(source).unflatten(2, (attn.heads, -1))
        if image_rotary_emb is not None:
            widths = thirds(query.shape[-1])
            query, key = rotated(query, image_rotary_emb, widths), rotated(key, image_rotary_emb, widths)

        output = skiparse_attention(query, key, value, self.sets, self._kernel, attention_mask)
        return attn.to_out[1](attn.to_out[0](output.flatten(2)))

    def _kernel(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return dispatch_attention_fn(q, k, v, attn_mask=mask, backend=self._attention_backend)


class SkiparseBlock(nn.Module):
    """Attention to the video, attention to the caption, projections. The first and the last are modulated by time."""

    def __init__(self, width: int, heads: int, caption_width: int, activation: str, eps: float, sets: SkiparseSets):
        super().__init__()
        layers: JsonObject = {"query_dim": width, "heads": heads, "dim_head": width // heads, "bias": True}
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=eps)
        self.attn1 = Attention(**layers, processor=SkiparseProcessor(sets))
        self.attn2 = Attention(**layers, cross_attention_dim=caption_width, processor=SkiparseProcessor())
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=eps)
        self.ff = FeedForward(width, activation_fn=activation)
        self.scale_shift_table = nn.Parameter(torch.randn(6, width) / width**0.5)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        image_rotary_emb: Tables,
        attention_mask: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(B, L, width).

        Args:
            hidden_states: (B, L, width) video tokens.
            encoder_hidden_states: (B, S, width) of the caption.
            temb: (B, 6, width) of the time.
            image_rotary_emb: Positions of the tokens.
            attention_mask: (B, L) bool of tokens of the whole video, of all ranks.
            encoder_attention_mask: (B, S) bool.
        """
        # Each is (B, 1, width).
        modulation = (self.scale_shift_table + temb).unsqueeze(2).unbind(1)
        shift_seen, scale_seen, gate_seen, shift_out, scale_out, gate_out = modulation
        seen = modulated(self.norm1, hidden_states, scale_seen, shift_seen)
        seen = self.attn1(seen, attention_mask=attention_mask, image_rotary_emb=image_rotary_emb)
        hidden_states = hidden_states + gate_seen * seen
        # Neither normed nor gated: attention to the caption is not modulated by time.
        told = self.attn2(hidden_states, encoder_hidden_states, attention_mask=encoder_attention_mask)
        hidden_states = hidden_states + told
        out = self.ff(modulated(self.norm2, hidden_states, scale_out, shift_out))
        return hidden_states + gate_out * out


class FramePatches(nn.Module):
    """Patches of each frame as tokens: (B, C, T, H, W) → (B, L, width)."""

    def __init__(self, patch: int, channels: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """Frames outermost, then rows, then columns."""
        # (B · T, C, H, W) → (B · T, width, rows, columns)
        frames = self.proj(latents.transpose(1, 2).flatten(0, 1))
        return frames.flatten(2).unflatten(0, (len(latents), -1)).transpose(2, 3).flatten(1, 2)


class ZeroLinear(nn.Linear):
    """A layer that gives zeros before something is learned."""

    def reset_parameters(self) -> None:
        """Begin with zeros, as is released for training."""
        nn.init.zeros_(self.weight)


def _added_patches(patch: int, channels: int, width: int) -> nn.ModuleList:
    """Patches that add nothing to those of the latents before something is learned."""
    return nn.ModuleList([FramePatches(patch, channels, width), ZeroLinear(width, width, bias=False)])


def frames_of_patches(patches: torch.Tensor, grid: tuple[int, int, int], patch: int) -> torch.Tensor:
    """Invert the order of `FramePatches`: (B, L, patch² · C) → (B, C, T, H, W)."""
    # (B, T, rows, columns, p, q, C) → (B, C, T, rows, p, columns, q)
    patches = patches.unflatten(2, (patch, patch, -1)).unflatten(1, grid).permute(0, 6, 1, 2, 4, 3, 5)
    return patches.flatten(5, 6).flatten(3, 4)


class OpenSoraT2V_v1_3(ModelMixin, ConfigMixin, PeftAdapterMixin):
    """Open-Sora Plan 1.3: text to video. Arguments are the settings of released configurations.

    Args:
        num_attention_heads: Heads.
        attention_head_dim: Width of each, a multiple of 6.
        in_channels: Of latents.
        out_channels: Of the prediction; None: as many.
        num_layers: Blocks.
        dropout: 0.
        cross_attention_dim: Width of a projected caption, which is that of the blocks.
        attention_bias: True.
        sample_size_h: Of no effect, as the next two.
        sample_size_w: Of no effect.
        sample_size_t: Of no effect.
        patch_size: Latent positions along a side of a token.
        patch_size_t: 1.
        activation_fn: Of the projections in a block.
        only_cross_attention: False.
        double_self_attention: False.
        upcast_attention: False.
        norm_elementwise_affine: False.
        norm_eps: Of the norms in a block.
        caption_channels: Width of the text encoder.
        interpolation_scale_h: What positions are divided by.
        interpolation_scale_w: The same for columns.
        interpolation_scale_t: The same for frames.
        sparse1d: Whether blocks 2 … 29 attend sparsely.
        sparse_n: Into how many sets tokens are dealt there.
        vae_scale_factor_t: Frames of a latent frame: channels of the mask where frames are given.
    """

    _no_split_modules = ["SkiparseBlock"]
    _takes_frames = False

    @register_to_config
    def __init__(
        self,
        num_attention_heads: int = 16,
        attention_head_dim: int = 88,
        in_channels: int = 8,
        out_channels: int | None = None,
        num_layers: int = 1,
        dropout: float = 0.0,
        cross_attention_dim: int | None = None,
        attention_bias: bool = True,
        sample_size_h: Any = None,
        sample_size_w: Any = None,
        sample_size_t: int | None = None,
        patch_size: int = 2,
        patch_size_t: int = 1,
        activation_fn: str = "gelu-approximate",
        only_cross_attention: bool = False,
        double_self_attention: bool = False,
        upcast_attention: bool = False,
        norm_elementwise_affine: bool = False,
        norm_eps: float = 1e-6,
        caption_channels: int = 4096,
        interpolation_scale_h: float = 1.0,
        interpolation_scale_w: float = 1.0,
        interpolation_scale_t: float = 1.0,
        sparse1d: bool = False,
        sparse_n: int = 2,
        vae_scale_factor_t: int = 4,
    ) -> None:
        super().__init__()
        width = num_attention_heads * attention_head_dim
        given = {**self.config, "attention_head_dim % 6": attention_head_dim % 6}
        for name, value in {**_UNBUILT, "attention_head_dim % 6": 0}.items():
            if given[name] != value:
                raise ValueError(f"{name} is {given[name]!r}, and no release has another value than {value!r}")
        self.caption_projection = PixArtAlphaTextProjection(caption_channels, width)
        self.pos_embed = FramePatches(patch_size, in_channels, width)
        blocks = []
        for at in range(num_layers):
            is_sparse = sparse1d and _FIRST_SPARSE <= at < _AFTER_SPARSE
            sets = _EVERY
            if is_sparse:  # the two ways of dealing tokens into sets take turns
                sets = SkiparseSets(sparse_n, in_runs=at % 2 == 1)
            caption_width = cross_attention_dim or width
            blocks.append(SkiparseBlock(width, num_attention_heads, caption_width, activation_fn, norm_eps, sets))
        self.transformer_blocks = nn.ModuleList(blocks)
        self.norm_out = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.scale_shift_table = nn.Parameter(torch.randn(2, width) / width**0.5)
        self.proj_out = nn.Linear(width, patch_size**2 * (out_channels or in_channels))
        self.adaln_single = AdaLayerNormSingle(width)
        if self._takes_frames:
            self.pos_embed_masked_hidden_states = _added_patches(patch_size, in_channels, width)
            self.pos_embed_mask = _added_patches(patch_size, vae_scale_factor_t, width)

    def tokens_of(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Latents as tokens, (B, L, width)."""
        return self.pos_embed(hidden_states)

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[torch.Tensor]:
        """The prediction, (B, C, T, H, W).

        Args:
            hidden_states: (B, C, T, H, W) latents.
            timestep: (B,) numbers of steps.
            encoder_hidden_states: (B, S, D) of captions.
            attention_mask: (B, T, H, W): 0 for latents that only fill up a batch; a token with another one counts.
            encoder_attention_mask: (B, S): 0 for padding.
            return_dict: Return the class of diffusers' transformers.
        """
        rows, patch, config = len(hidden_states), self.config.patch_size, self.config
        grid = (hidden_states.shape[2], hidden_states.shape[3] // patch, hidden_states.shape[4] // patch)
        tokens = self.tokens_of(hidden_states)
        time, embedded = self.adaln_single(timestep, batch_size=rows, hidden_dtype=tokens.dtype)
        scales = (config.interpolation_scale_t, config.interpolation_scale_h, config.interpolation_scale_w)
        tables = rotary_tables(grid, thirds(config.attention_head_dim), tokens, scales)
        caption = self.caption_projection(encoder_hidden_states)
        told = encoder_attention_mask
        if told is not None:
            told = told.bool()
        if attention_mask is not None:
            # (B, T, rows, patch, columns, patch): a token counts if any of its positions does.
            of_patches = attention_mask.bool().unflatten(3, (-1, patch)).unflatten(2, (-1, patch))
            attention_mask = of_patches.any(5).any(3).flatten(1)
        for block in self.transformer_blocks:
            tokens = block(tokens, caption, time.unflatten(1, (6, -1)), tables, attention_mask, told)
        shift, scale = (self.scale_shift_table + embedded[:, None]).chunk(2, dim=1)
        patches = self.proj_out(self.norm_out(tokens) * (1 + scale) + shift)
        sample = frames_of_patches(patches, grid, patch)
        if return_dict:
            return Transformer2DModelOutput(sample=sample)
        return (sample,)


class OpenSoraInpaint_v1_3(OpenSoraT2V_v1_3):
    """Open-Sora Plan 1.3 with given frames: behind the channels of the latents stand those of the masked video, and
    which frames are masked."""

    _takes_frames = True

    def tokens_of(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Tokens of latents, to which those of the masked video and of the mask are added."""
        channels = self.config.in_channels
        noisy, masked, mask = hidden_states.split([channels, channels, self.config.vae_scale_factor_t], dim=1)
        tokens = self.pos_embed(noisy)
        for (patches, linear), part in ((self.pos_embed_masked_hidden_states, masked), (self.pos_embed_mask, mask)):
            tokens = tokens + linear(patches(part))
        return tokens
