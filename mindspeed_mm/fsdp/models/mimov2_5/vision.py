"""The vision tower of MiMo-V2.5: blocks whose patches see their whole frame, or those near them along rows or along
columns of the frame, and a merger of squares of patches.

Modules are named as the released weights are. Shapes: P patches of all pictures and frames, H heads of queries, K of
keys and values, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from mindspeed_mm.fsdp.models.mimov2_5.configuration_mimov2_5 import MiMoV2VisionConfig
from mindspeed_mm.fsdp.ops.attention import varlen_attention
from mindspeed_mm.fsdp.ops.host_values import host_values, moved_with_values

_SINK_FEATURES = 16
"""Added to the width of heads where the first patch has a learned part: one would do, but fused kernels take widths
that 16 divides."""
_THETA = 10000.0
_COLUMNS = 1


class Patches(NamedTuple):
    """What blocks are told of all patches, in one order of them."""

    cos: torch.Tensor
    """(P, D)"""
    sin: torch.Tensor
    borders: torch.Tensor
    """(frames + 1,) from 0 to P."""
    longest: int
    """Patches of the largest frame."""
    firsts: torch.Tensor
    """(P,) 1 for the first patch of a frame, 0 for others."""


class MiMoVisionAttention(nn.Module):
    """Attention inside frames. The first patch of a frame has `sinks` added to its scores, one number a head; the
    serving code and the released code do so alike.

    Args:
        config: Of the tower.
        sees_all: Whether a patch sees its whole frame.
    """

    is_causal = False

    def __init__(self, config: MiMoV2VisionConfig, sees_all: bool) -> None:
        super().__init__()
        self.heads, self.width = (config.num_heads, config.num_key_value_heads), config.qk_channels
        self.window = None
        if not sees_all and config.visual_token_window_size > 0:
            self.window = config.visual_token_window_size + 1
        self.qkv = nn.Linear(config.hidden_size, (self.heads[0] + 2 * self.heads[1]) * self.width)
        self.proj = nn.Linear(self.heads[0] * self.width, config.hidden_size)
        self.sinks = None
        if config.use_sink and not sees_all:
            self.sinks = nn.Parameter(torch.zeros(self.heads[0]))

    def forward(self, hidden: torch.Tensor, patches: Patches) -> torch.Tensor:
        """(P, features) → the same."""
        queries, keys = self.heads
        mixed_PHD = self.qkv(hidden).unflatten(1, (-1, self.width))
        q, k, v = mixed_PHD.transpose(0, 1)[None].split([queries, keys, keys], dim=1)
        q, k = (_turned(each, patches) for each in (q, k))
        if self.sinks is not None:
            q, k, v = self._with_sinks(q, k, v, patches.firsts)
        attended, _ = varlen_attention(
            self,
            q,
            k,
            v,
            None,
            scaling=self.width**-0.5,
            two_way_window=self.window,
            cu_seq_lens_q=patches.borders,
            max_length_q=patches.longest,
        )
        output: torch.Tensor = self.proj(attended[0, :, :, : self.width].flatten(1))  # without the added features
        return output

    def _with_sinks(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, firsts_P: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Heads get more features: the sink in queries, and 1 in the keys of first patches, so that any kernel adds it
        to their scores. Values become as wide, as kernels want it."""
        assert self.sinks is not None
        # Attention divides scores by √D: times √D, the sink is added as it is.
        scores = (self.sinks.to(q.dtype) * self.width**0.5).view(1, -1, 1, 1).expand(1, -1, len(firsts_P), 1)
        marks = firsts_P.to(k.dtype).view(1, 1, -1, 1).expand(1, k.shape[1], -1, 1)
        rest = (0, _SINK_FEATURES - 1)
        wide_q = torch.cat([q, F.pad(scores, rest)], dim=-1)
        return wide_q, torch.cat([k, F.pad(marks, rest)], dim=-1), F.pad(v, (0, _SINK_FEATURES))


def _turned(heads_1HPD: torch.Tensor, patches: Patches) -> torch.Tensor:
    """Features of the first half with those of the other half, turned in fp32 or wider."""
    wide = heads_1HPD.to(torch.promote_types(heads_1HPD.dtype, torch.float32))
    first, second = wide.chunk(2, dim=-1)
    turned = wide * patches.cos + torch.cat([-second, first], dim=-1) * patches.sin
    return turned.to(heads_1HPD.dtype)


class MiMoVisionMLP(nn.Module):
    """Gated, with biases.

    Args:
        config: Of the tower.
    """

    def __init__(self, config: MiMoV2VisionConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(P, features) → the same."""
        output: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class MiMoVisionBlock(GradientCheckpointingLayer):
    """Attention and MLP behind norms.

    Args:
        config: Of the tower.
        sees_all: Whether a patch sees its whole frame.
    """

    def __init__(self, config: MiMoV2VisionConfig, sees_all: bool) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm2 = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attn = MiMoVisionAttention(config, sees_all)
        self.mlp = MiMoVisionMLP(config)

    def forward(self, hidden: torch.Tensor, patches: Patches) -> torch.Tensor:
        """(P, features) → the same."""
        hidden = hidden + self.attn(self.norm1(hidden), patches)
        output: torch.Tensor = hidden + self.mlp(self.norm2(hidden))
        return output


class MiMoVisionPatchEmbed(nn.Module):
    """Pixels of a patch to its features.

    Args:
        config: Of the tower.
    """

    def __init__(self, config: MiMoV2VisionConfig) -> None:
        super().__init__()
        sides = (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.proj = nn.Conv3d(config.in_chans, config.hidden_size, sides, stride=sides, bias=False)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """(P, numbers) → (P, features), as one product: a convolution of single patches is slow."""
        weight = self.proj.weight
        return F.linear(pixels.to(weight.dtype), weight.flatten(1))


class MiMoVisionPatchMerger(nn.Module):
    """Neighbouring patches to one token. Its released weights have no biases.

    Args:
        config: Of the tower.
    """

    def __init__(self, config: MiMoV2VisionConfig) -> None:
        super().__init__()
        self.width = config.hidden_size * config.spatial_merge_size**2
        self.ln_q = nn.LayerNorm(config.hidden_size, eps=1e-6, bias=False)
        widen, narrow = (nn.Linear(self.width, out, bias=False) for out in (self.width, config.out_hidden_size))
        self.mlp = nn.Sequential(widen, nn.GELU(), narrow)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(P, features) → (tokens, features of the text model)."""
        output: torch.Tensor = self.mlp(self.ln_q(hidden).view(-1, self.width))
        return output


class MiMoVisionTransformer(PreTrainedModel):
    """The tower.

    Args:
        config: Its section.
    """

    config: MiMoV2VisionConfig
    config_class = MiMoV2VisionConfig
    main_input_name = "pixel_values"
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    _no_split_modules = ("MiMoVisionBlock",)

    def __init__(self, config: MiMoV2VisionConfig) -> None:
        super().__init__(config)
        self.patch_embed = MiMoVisionPatchEmbed(config)
        whole = set(config.fullatt_block_indexes)
        self.blocks = nn.ModuleList(MiMoVisionBlock(config, number in whole) for number in range(config.depth))
        self.merger = MiMoVisionPatchMerger(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MiMoVisionAttention) and module.sinks is not None:
            nn.init.zeros_(module.sinks)

    def forward(self, pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        """(P, numbers of a patch) → (tokens, features of the text model), in the order of rows.

        Args:
            pixel_values: Patches of all pictures, square by square of those that are merged.
            grid_thw: (pictures, 3) patches along time, height and width.
        """
        grids, unit = host_values(grid_thw), self.config.spatial_merge_size**2
        hidden = self.patch_embed(pixel_values)
        order = _column_order(grids, self.config.spatial_merge_size)
        rows = self._patches(grids, torch.arange(len(order)), hidden.device)
        columns = self._patches(grids, order, hidden.device)
        to_columns, to_rows = (each.to(hidden.device) for each in (order, order.argsort()))
        # By `by_column`: what blocks are told of the patches, and the order that leads there from the other one.
        arranged = ((rows, to_rows), (columns, to_columns))
        by_column = False
        for kind, block in zip(self.config.vit_window_attn_types, self.blocks, strict=True):
            if (kind == _COLUMNS) != by_column:
                by_column = not by_column
                hidden = _reordered(hidden, arranged[by_column][1], unit)
            hidden = block(hidden, arranged[by_column][0])
        if by_column:
            hidden = _reordered(hidden, to_rows, unit)
        output: torch.Tensor = self.merger(hidden)
        return output

    def _patches(self, grids: Sequence[Sequence[int]], order: torch.Tensor, device: torch.device) -> Patches:
        """Of all patches, where squares of them stand in an order."""
        merge, width = self.config.spatial_merge_size, self.config.qk_channels
        places = torch.cat([_places(grid, merge) for grid in grids])
        speeds = 1 / _THETA ** (torch.arange(0, width // 2, 2) / (width // 2))
        # (P, 2, D / 4) → (P, D / 2): speeds of the row, then of the column.
        angles = (_reordered(places, order, merge**2)[:, :, None] * speeds).flatten(1)
        turned = torch.cat([angles, angles], dim=1).to(device)
        sizes = list(chain.from_iterable([height * across] * time for time, height, across in grids))
        borders = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
        firsts = torch.zeros(len(places))
        firsts[borders[:-1].long()] = 1
        return Patches(turned.cos(), turned.sin(), moved_with_values(borders, device), max(sizes), firsts.to(device))


def _places(grid: Sequence[int], merge: int) -> torch.Tensor:
    """(P, 2) row and column of each patch of a picture, square by square of those that are merged."""
    time, height, width = grid
    places = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"), dim=-1)
    squares = places.view(height // merge, merge, width // merge, merge, 2).transpose(1, 2)
    return squares.reshape(-1, 2).repeat(time, 1)


def _column_order(grids: Sequence[Sequence[int]], merge: int) -> torch.Tensor:
    """(squares,) which square stands where, column by column inside each frame."""
    found, before = [], 0
    for time, height, width in grids:
        squares = torch.arange(time * height * width // merge**2) + before
        found.append(squares.view(time, height // merge, width // merge).transpose(1, 2).flatten())
        before += len(squares)
    return torch.cat(found)


def _reordered(rows: torch.Tensor, order: torch.Tensor, unit: int) -> torch.Tensor:
    """Runs of `unit` rows in another order."""
    return rows.unflatten(0, (-1, unit))[order].flatten(0, 1)
