"""Layers of WF-VAE, which is causal in time: a clip may be encoded and decoded chunk by chunk, and comes out as in one
piece. Each layer remembers what the next chunk has to see of this one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

_HAAR_3D = 0.3536
"""1 / √8 as the released weights have it."""
_HAAR_2D = 0.5


@dataclass
class Chunk:
    """Where in a clip the layers of an encoder or a decoder are; all of them share one."""

    is_first: bool = True
    looks_ahead: bool = False
    """Whether the latent frame at the end comes again, as the first one of the next chunk."""


class Remembering(nn.Module):
    """A layer that carries frames from one chunk to the next.

    Args:
        chunk: Of its encoder or decoder.
        rate: Frames that a latent frame has become here: so many come again where a chunk looks ahead.
    """

    def __init__(self, chunk: Chunk, rate: int) -> None:
        super().__init__()
        self.chunk, self.rate = chunk, rate
        self.past: torch.Tensor | None = None

    def settled(self, frames: torch.Tensor) -> torch.Tensor:
        """Those of a chunk, (B, C, T, H, W), that do not come again."""
        return frames[:, :, : frames.shape[2] - self.rate * self.chunk.looks_ahead]


class CausalConv3d(Remembering):
    """A convolution that sees no later frame: copies of the first one stand before it."""

    def __init__(
        self, channels: int, out: int, chunk: Chunk, rate: int = 1, kernel: int = 3, stride: int = 1, padding: int = 1
    ) -> None:
        super().__init__(chunk, rate)
        self.kernel, self.stride = kernel, stride
        self.conv = nn.Conv3d(channels, out, kernel, stride, padding=(0, padding, padding))

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """(B, C, T, H, W)."""
        if self.chunk.is_first:
            self.past = frames[:, :, :1].expand(-1, -1, self.kernel - 1, -1, -1)
        assert self.past is not None
        frames = torch.cat([self.past, frames], dim=2)
        kept = self.settled(frames)
        self.past = kept[:, :, kept.shape[2] - (self.kernel - self.stride) :].clone()
        return self.conv(frames)


class FrameConv2d(nn.Conv2d):
    """A convolution of each frame: its weights are those of a picture's."""

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """(B, C, T, H, W)."""
        made = super().forward(frames.transpose(1, 2).flatten(0, 1))
        return made.unflatten(0, (len(frames), -1)).transpose(1, 2)


class ChannelNorm(nn.Module):
    """Layer norm over channels, in each place alone."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """(B, C, T, H, W)."""
        return self.norm(frames.movedim(1, -1)).movedim(-1, 1)


class ResnetBlock(nn.Module):
    """Two convolutions beside the way around them, of frames alone or causal in time."""

    def __init__(self, channels: int, out: int, chunk: Chunk | None, rate: int = 1) -> None:
        super().__init__()
        self.norm1, self.norm2 = ChannelNorm(channels), ChannelNorm(out)
        self.conv1 = _conv(channels, out, chunk, rate)
        self.conv2 = _conv(out, out, chunk, rate)
        if channels != out:
            self.nin_shortcut = _conv(channels, out, chunk, rate, kernel=1)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """(B, C, T, H, W)."""
        made = self.conv1(F.silu(self.norm1(frames)))
        made = self.conv2(F.silu(self.norm2(made)))
        around = self.nin_shortcut(frames) if hasattr(self, "nin_shortcut") else frames
        return around + made


def _conv(channels: int, out: int, chunk: Chunk | None, rate: int, kernel: int = 3) -> nn.Module:
    if chunk is None:
        return FrameConv2d(channels, out, kernel, padding=kernel // 2)
    return CausalConv3d(channels, out, chunk, rate, kernel, padding=kernel // 2)


class FrameAttention(nn.Module):
    """Attention of one head between the places of a frame."""

    def __init__(self, channels: int, chunk: Chunk) -> None:
        super().__init__()
        self.norm = ChannelNorm(channels)
        for name in ("q", "k", "v", "proj_out"):
            setattr(self, name, CausalConv3d(channels, channels, chunk, kernel=1, padding=0))

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """(B, C, T, H, W)."""
        seen = self.norm(frames)
        q, k, v = (
            layer(seen).permute(0, 2, 3, 4, 1).flatten(2, 3).flatten(0, 1).unsqueeze(1)
            for layer in (self.q, self.k, self.v)
        )
        made = F.scaled_dot_product_attention(q, k, v).squeeze(1)
        made = made.unflatten(1, frames.shape[-2:]).unflatten(0, (len(frames), -1)).movedim(-1, 1)
        return frames + self.proj_out(made)


class Downsample(nn.Module):
    """Halves the sides of frames."""

    def __init__(self, channels: int, chunk: Chunk) -> None:
        super().__init__()
        self.conv = FrameConv2d(channels, channels, 3, stride=2)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """(B, C, T, H, W): zeros stand at the right and below."""
        return self.conv(F.pad(frames, (0, 1, 0, 1)))


class Spatial2xTime2x3DDownsample(nn.Module):
    """Halves the sides of frames, and their number: 2k + 1 become k + 1."""

    def __init__(self, channels: int, chunk: Chunk) -> None:
        super().__init__()
        self.conv = CausalConv3d(channels, channels, chunk, stride=2, padding=0)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """(B, C, T, H, W): zeros stand at the right and below."""
        return self.conv(F.pad(frames, (0, 1, 0, 1)))


class Upsample(nn.Module):
    """Doubles the sides of frames."""

    def __init__(self, channels: int, chunk: Chunk, rate: int, interpolation: str) -> None:
        super().__init__()
        self.conv = FrameConv2d(channels, channels, 3, padding=1)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """(B, C, T, H, W)."""
        return self.conv(F.interpolate(frames, scale_factor=(1.0, 2.0, 2.0), mode="nearest"))


class Spatial2xTime2x3DUpsample(Remembering):
    """Doubles the sides of frames, and their number but for the first one: k + 1 become 2k + 1."""

    def __init__(self, channels: int, chunk: Chunk, rate: int, interpolation: str) -> None:
        super().__init__(chunk, rate)
        self.interpolation = interpolation
        self.conv = CausalConv3d(channels, channels, chunk, 2 * rate)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """(B, C, T, H, W): frames are interpolated between each other, and the first of a clip with none."""
        first, others = frames[:, :, : int(self.chunk.is_first)], frames[:, :, int(self.chunk.is_first) :]
        before = others[:, :, :0] if self.chunk.is_first or self.past is None else self.past
        settled = self.settled(others)
        self.past = (settled if settled.shape[2] else before)[:, :, -1:].clone()
        if others.shape[2]:
            others = torch.cat([before, others], dim=2)
            others = F.interpolate(others, scale_factor=(2.0, 1.0, 1.0), mode=self.interpolation)
        frames = torch.cat([first, others[:, :, 2 * before.shape[2] :]], dim=2)
        return self.conv(F.interpolate(frames, scale_factor=(1.0, 2.0, 2.0), mode="trilinear"))


class HaarWavelet(nn.Module):
    """One level of the Haar transform: the low band of all channels, then the others.

    Args:
        axes: 3: time, height and width; 2: of each frame.
        chunk: Of the encoder or the decoder.
    """

    def __init__(self, axes: int, chunk: Chunk) -> None:
        super().__init__()
        signs = torch.tensor([1.0, -1.0])
        plain = torch.ones(2)
        kernels = []
        for band in range(2**axes):
            if axes == 3:
                bits = (band & 4, band & 2, band & 1)
            else:
                bits = (0, band & 1, band & 2)
            t, h, w = (signs if bit else plain for bit in bits)
            kernels.append(torch.einsum("i,j,k->ijk", t[: axes - 1], h, w))
        factor = _HAAR_3D if axes == 3 else _HAAR_2D
        self.register_buffer("kernel", torch.stack(kernels)[:, None] * factor, persistent=False)
        self.chunk, self.is_in_time = chunk, axes == 3

    @property
    def stride(self) -> tuple[int, int, int]:
        """That of time, height and width."""
        return (2 if self.is_in_time else 1, 2, 2)


class HaarTransform(HaarWavelet):
    """Bands of a clip: 2k + 1 frames become k + 1 where time is transformed, too."""

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """(B, C, T, H, W) → (B, bands · C, T′, H / 2, W / 2)."""
        if self.is_in_time and self.chunk.is_first:
            frames = torch.cat([frames[:, :, :1], frames], dim=2)
        bands = F.conv3d(frames.flatten(0, 1).unsqueeze(1), self.kernel.to(frames.dtype), stride=self.stride)
        return bands.unflatten(0, frames.shape[:2]).transpose(1, 2).flatten(1, 2)


class InverseHaarTransform(HaarWavelet):
    """A clip of its bands: k + 1 frames become 2k + 1 where time is transformed, too."""

    def forward(self, bands: torch.Tensor) -> torch.Tensor:
        """(B, bands · C, T, H, W) → (B, C, T′, 2H, 2W)."""
        each = bands.unflatten(1, (len(self.kernel), -1)).transpose(1, 2)
        frames = F.conv_transpose3d(each.flatten(0, 1), self.kernel.to(bands.dtype), stride=self.stride)
        frames = frames.unflatten(0, each.shape[:2]).squeeze(2)
        if self.is_in_time and self.chunk.is_first:
            return frames[:, :, 1:]
        return frames


def low_band(frames: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """Bands with something added to the low one, whose channels stand in front."""
    low = added.shape[1]
    return torch.cat([frames[:, :low] + added, frames[:, low:]], dim=1)


def bands_of(channels: int, axes: int) -> int:
    """Channels of so many channels' bands."""
    return channels * int(math.pow(2, axes))
