"""Step-Video's VAE: 17 frames become 3 latent frames, 16 pixels one position, in groups apart from each other.

Facts: the technical report (arXiv 2502.10248, section 3.1) and `vae/vae.py` of stepfun-ai/Step-Video-T2V, version 2.
Names of modules are those of the released file.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from torch import nn

from mindspeed_mm.fsdp.models.stepvideo.sizes import GROUP_FRAMES, GROUP_LATENTS

_KEPT = 0.6
"""Share of a frame beside the border of two groups that stays its own; the rest is the other side's."""
_PATCHED = 2
"""Positions along each axis that are folded into channels in the end."""


class StepVideoCausalConv(nn.Module):
    """A convolution that sees no later frame.

    Args:
        inputs: Channels.
        outputs: Channels.
        kernel: Along every axis: odd.
        stride: Along every axis.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv3d(inputs, outputs, kernel, stride=stride)
        side = kernel // 2
        self._padding = (side, side, side, side, kernel - 1, 0)

    def forward(self, media_BCTHW: torch.Tensor) -> torch.Tensor:
        """(B, C, T, H, W)."""
        made: torch.Tensor = self.conv(F.pad(media_BCTHW, self._padding))
        return made


def _normed(media: torch.Tensor, norm: nn.GroupNorm) -> torch.Tensor:
    """Each frame is normalised for itself."""
    by_frame: torch.Tensor = norm(media.transpose(1, 2).flatten(0, 1))
    return by_frame.unflatten(0, (len(media), -1)).transpose(1, 2)


class StepVideoResnet(nn.Module):
    """Two convolutions beside a shortcut.

    Args:
        inputs: Channels.
        outputs: Channels.
        groups: Of norms.
    """

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(groups, inputs), nn.GroupNorm(groups, outputs)
        self.conv1, self.conv2 = StepVideoCausalConv(inputs, outputs), StepVideoCausalConv(outputs, outputs)
        self.nin_shortcut = None if inputs == outputs else StepVideoCausalConv(inputs, outputs, 1)

    def forward(self, media: torch.Tensor) -> torch.Tensor:
        """(B, outputs, T, H, W)."""
        hidden = self.conv1(F.silu(_normed(media, self.norm1)))
        hidden = self.conv2(F.silu(_normed(hidden, self.norm2)))
        shortcut: torch.Tensor = media if self.nin_shortcut is None else self.nin_shortcut(media)
        return shortcut + hidden


class StepVideoVAEAttention(nn.Module):
    """One head over all positions, each of which sees those in front of it, row after row, frame after frame.

    Args:
        channels: Width.
        groups: Of the norm.
    """

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels)
        self.q, self.k, self.v, self.proj_out = (StepVideoCausalConv(channels, channels, 1) for _ in range(4))

    def forward(self, media: torch.Tensor) -> torch.Tensor:
        """(B, C, T, H, W) again."""
        normed = _normed(media, self.norm)
        q, k, v = (each(normed).flatten(2).transpose(1, 2).unsqueeze(1) for each in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        made: torch.Tensor = media + self.proj_out(seen.squeeze(1).transpose(1, 2).unflatten(2, media.shape[2:]))
        return made


class StepVideoMiddle(nn.Module):
    """Between encoder and decoder levels.

    Args:
        channels: Width.
        groups: Of norms.
    """

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.block_1 = StepVideoResnet(channels, channels, groups)
        self.attn_1 = StepVideoVAEAttention(channels, groups)
        self.block_2 = StepVideoResnet(channels, channels, groups)

    def forward(self, media: torch.Tensor) -> torch.Tensor:
        """(B, C, T, H, W) again."""
        made: torch.Tensor = self.block_2(self.attn_1(self.block_1(media)))
        return made


class StepVideoDownsample(nn.Module):
    """Halves the sides, and with `in_time` the frames behind the first.

    Args:
        channels: Width.
        in_time: Whether it does.
    """

    def __init__(self, channels: int, in_time: bool) -> None:
        super().__init__()
        of_frames = nn.Conv2d(channels, channels, 3, stride=2)
        self.conv = StepVideoCausalConv(channels, channels, stride=2) if in_time else of_frames
        self._in_time = in_time

    def forward(self, media: torch.Tensor) -> torch.Tensor:
        """(B, C, T or (T + 1) / 2, H / 2, W / 2)."""
        if self._in_time:
            made: torch.Tensor = self.conv(media)
            return made
        halved: torch.Tensor = self.conv(F.pad(media.transpose(1, 2).flatten(0, 1), (0, 1, 0, 1)))
        return halved.unflatten(0, (len(media), -1)).transpose(1, 2)


class StepVideoUpsample(nn.Module):
    """Doubles the sides, with `in_time` the frames, too.

    Args:
        channels: Width.
        in_time: Whether it does.
        groups: Of norms.
    """

    def __init__(self, channels: int, in_time: bool, groups: int) -> None:
        super().__init__()
        if in_time:
            self.conv3d = StepVideoUpsampleBlock(channels, groups)
        else:
            self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self._in_time = in_time

    def forward(self, media: torch.Tensor) -> torch.Tensor:
        """(B, C, T or 2 T, 2 H, 2 W)."""
        if self._in_time:
            made: torch.Tensor = self.conv3d(F.interpolate(media, scale_factor=2.0))
            return made
        frames = self.conv(F.interpolate(media.transpose(1, 2).flatten(0, 1), scale_factor=2.0))
        return frames.unflatten(0, (len(media), -1)).transpose(1, 2)


class StepVideoUpsampleBlock(nn.Module):
    """What smooths doubled frames.

    Args:
        channels: Width.
        groups: Of norms.
    """

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = StepVideoCausalConv(channels, channels), StepVideoCausalConv(channels, channels)
        self.norm1, self.norm2 = nn.GroupNorm(groups, channels), nn.GroupNorm(groups, channels)

    def forward(self, media: torch.Tensor) -> torch.Tensor:
        """(B, C, T, H, W) again; norms stand behind convolutions here, and the input is added twice."""
        hidden = F.silu(_normed(self.conv1(media), self.norm1))
        return F.silu(_normed(self.conv2(hidden), self.norm2) + media) + media


def folded(media: torch.Tensor, factor: int) -> torch.Tensor:
    """Blocks of `factor` frames, rows and columns as channels; zeros stand before the first frame."""
    media = F.pad(media, (0, 0, 0, 0, factor - 1, 0))
    B, C, T, H, W = media.shape
    split = media.view(B, C, T // factor, factor, H // factor, factor, W // factor, factor)
    return split.permute(0, 1, 3, 5, 7, 2, 4, 6).reshape(B, -1, T // factor, H // factor, W // factor)


def unfolded(media: torch.Tensor, factor: int) -> torch.Tensor:
    """Invert `folded`: channels as frames, rows and columns; the frames before the first are left out."""
    B, _, T, H, W = media.shape
    split = media.view(B, -1, factor, factor, factor, T, H, W).permute(0, 1, 5, 2, 6, 3, 7, 4)
    return split.reshape(B, -1, T * factor, H * factor, W * factor)[:, :, factor - 1 :]


def _averaged(media: torch.Tensor, channels: int) -> torch.Tensor:
    """(B, channels, …): means of neighbouring channels."""
    return media.unflatten(1, (channels, -1)).mean(dim=2)


class StepVideoLevel(nn.Module):
    """Blocks of one size, and what changes it.

    Args:
        widths: Channels before, between and behind the blocks.
        groups: Of norms.
        name: `downsample` or `upsample`.
        resize: What changes the size; None: nothing does.
    """

    def __init__(self, widths: Sequence[int], groups: int, name: str = "", resize: nn.Module | None = None) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            StepVideoResnet(before, behind, groups) for before, behind in itertools.pairwise(widths)
        )
        self._resize = name
        if resize is not None:
            self.add_module(name, resize)

    def forward(self, media: torch.Tensor) -> torch.Tensor:
        """(B, C, T, H, W) in the next size."""
        for block in self.block:
            media = block(media)
        made: torch.Tensor = self.get_submodule(self._resize)(media) if self._resize else media
        return made


class StepVideoEncoder(nn.Module):
    """Pixels to the parameters of a posterior.

    Args:
        channels: Of the latents.
        base: Channels of the first convolution.
        multipliers: Channels of each level, as multiples of `base`.
        blocks: Of a level.
        groups: Of norms.
    """

    def __init__(self, channels: int, base: int, multipliers: Sequence[int], blocks: int, groups: int) -> None:
        super().__init__()
        self.conv_in = StepVideoCausalConv(3, base)
        self.down = nn.ModuleList()
        before, last = base, len(multipliers) - 1
        for level, multiplier in enumerate(multipliers):
            width = base * multiplier
            if level == last:
                self.down.append(StepVideoLevel([before, *[width] * blocks], groups))
            else:
                down = StepVideoDownsample(width, in_time=level in (1, 2))
                self.down.append(StepVideoLevel([before, *[width] * blocks], groups, "downsample", down))
            before = width
        self.mid = StepVideoMiddle(before, groups)
        self.norm_out = nn.GroupNorm(groups, before)
        self._wide = 4 * channels * _PATCHED**3
        self.conv_patchify = nn.ModuleDict({"conv": StepVideoCausalConv(before, self._wide // _PATCHED**3)})
        self.conv_out = StepVideoCausalConv(self._wide, 2 * channels)
        self._moments = 2 * channels

    def forward(self, media: torch.Tensor) -> torch.Tensor:
        """(B, 2 C, T, H, W) of (B, 3, frames, height, width)."""
        hidden = self.conv_in(media)
        for level in self.down:
            hidden = level(hidden)
        hidden = F.silu(_normed(self.mid(hidden), self.norm_out))
        shortcut = _averaged(folded(hidden, _PATCHED), self._wide)
        hidden = folded(self.conv_patchify["conv"](hidden), _PATCHED) + shortcut
        made: torch.Tensor = self.conv_out(hidden) + _averaged(hidden, self._moments)
        return made


class StepVideoDecoder(nn.Module):
    """Latents to pixels.

    Args:
        channels: Of the latents.
        base: Channels of the last convolution.
        multipliers: Channels of each level, as multiples of `base`, the largest picture first.
        blocks: Of a level of the encoder; there is one more here.
        groups: Of norms.
    """

    def __init__(self, channels: int, base: int, multipliers: Sequence[int], blocks: int, groups: int) -> None:
        super().__init__()
        self._wide, widest = 4 * channels * _PATCHED**3, base * multipliers[-1]
        self._unpatched = widest * _PATCHED**3
        self.conv_in = StepVideoCausalConv(channels, self._wide)
        self.conv_unpatchify = nn.ModuleDict({"conv": StepVideoCausalConv(self._wide, self._unpatched)})
        self.mid = StepVideoMiddle(widest, groups)
        levels: list[StepVideoLevel] = []
        before = widest
        for level in reversed(range(len(multipliers))):
            width = base * multipliers[level]
            widths = [before, *[width] * (blocks + 1)]
            if level == 0:
                levels.insert(0, StepVideoLevel(widths, groups))
            else:
                up = StepVideoUpsample(width, level in (2, 3), groups)
                levels.insert(0, StepVideoLevel(widths, groups, "upsample", up))
            before = width
        self.up = nn.ModuleList(levels)
        self.norm_out = nn.GroupNorm(groups, before)
        self.conv_out = StepVideoCausalConv(before, 3)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """(B, 3, frames, height, width) of (B, C, T, H, W)."""
        hidden = self.conv_in(latents) + latents.repeat_interleave(self._wide // latents.shape[1], dim=1)
        repeats = self._unpatched // self._wide
        shortcut = unfolded(hidden.repeat_interleave(repeats, dim=1), _PATCHED)
        hidden = self.mid(unfolded(self.conv_unpatchify["conv"](hidden), _PATCHED) + shortcut)
        for level in reversed(self.up):
            hidden = level(hidden)
        made: torch.Tensor = self.conv_out(F.silu(_normed(hidden, self.norm_out)))
        return made[:, :, 3:]  # frames before the first, which doubling twice has made


class StepVideoVAE(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """8 × 16 × 16, in groups of 17 frames. A picture is a group of one frame, and one latent frame.

    Args:
        latent_channels: Channels of the latents.
        encoder_channels: Of its first convolution.
        encoder_multipliers: Of its levels.
        decoder_channels: Of its last convolution.
        decoder_multipliers: Of its levels.
        layers_per_block: Blocks of a level of the encoder.
        norm_num_groups: Of norms.
        scaling_factor: 1: latents are taken as they are.
    """

    @register_to_config
    def __init__(
        self,
        latent_channels: int = 64,
        encoder_channels: int = 32,
        encoder_multipliers: Sequence[int] = (4, 8, 16, 16),
        decoder_channels: int = 128,
        decoder_multipliers: Sequence[int] = (1, 2, 4, 4),
        layers_per_block: int = 2,
        norm_num_groups: int = 32,
        scaling_factor: float = 1.0,
    ) -> None:
        super().__init__()
        rest = (layers_per_block, norm_num_groups)
        self.encoder = StepVideoEncoder(latent_channels, encoder_channels, encoder_multipliers, *rest)
        self.decoder = StepVideoDecoder(latent_channels, decoder_channels, decoder_multipliers, *rest)

    def encode(
        self, media: torch.Tensor, return_dict: bool = True
    ) -> AutoencoderKLOutput | tuple[DiagonalGaussianDistribution]:
        """The posterior of (B, C, T, H, W) of pixels, (B, 3, frames, height, width) in −1..1: 3 latent frames of each
        17 frames."""
        moments = [self.encoder(group) for group in media.split(GROUP_FRAMES, dim=2)]
        posterior = DiagonalGaussianDistribution(torch.cat(moments, dim=2))
        if return_dict:
            return AutoencoderKLOutput(latent_dist=posterior)
        return (posterior,)

    def decode(self, latents: torch.Tensor, return_dict: bool = True) -> DecoderOutput | tuple[torch.Tensor]:
        """(B, 3, frames, height, width) in about −1..1. The two frames beside the border of two groups are mixed: first
        the one behind it, then the one before it with what that has become."""
        pixels = torch.cat([self.decoder(group) for group in latents.split(GROUP_LATENTS, dim=2)], dim=2)
        before = slice(GROUP_FRAMES - 1, pixels.shape[2] - 1, GROUP_FRAMES)
        behind = slice(GROUP_FRAMES, pixels.shape[2], GROUP_FRAMES)
        pixels[:, :, behind] = _KEPT * pixels[:, :, behind] + (1 - _KEPT) * pixels[:, :, before]
        pixels[:, :, before] = _KEPT * pixels[:, :, before] + (1 - _KEPT) * pixels[:, :, behind]
        if return_dict:
            return DecoderOutput(sample=pixels)
        return (pixels,)
