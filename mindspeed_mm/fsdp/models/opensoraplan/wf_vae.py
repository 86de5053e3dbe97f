"""WF-VAE (Li et al. 2024, arXiv 2411.17459), which diffusers does not have: the low bands of a wavelet transform go
around the layers of encoder and decoder.

Facts: https://github.com/PKU-YuanGroup/Open-Sora-Plan, `opensora/models/causalvideovae`. Names of weights and settings
are the released ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from mindspeed_mm.fsdp.models.opensoraplan import wf_vae_layers as layers
from mindspeed_mm.fsdp.models.opensoraplan.wf_vae_layers import (
    CausalConv3d,
    ChannelNorm,
    Chunk,
    FrameAttention,
    FrameConv2d,
    HaarTransform,
    InverseHaarTransform,
    ResnetBlock,
    bands_of,
    low_band,
)

_COLOURS = 3
_IN_TIME = "Spatial2xTime2x3D"
"""Begins the names of blocks that change the number of frames, too."""
_NORMS = ("layernorm", "aelayernorm")
_ATTENTIONS = ("AttnBlock3DFix", "WfCausalConv3dAttnBlock")


def _axes(block: str) -> int:
    """Of the wavelet beside a block: those that the block changes."""
    if block.startswith(_IN_TIME):
        return 3
    return 2


def _middle(channels: Sequence[int], uses_attention: bool, chunk: Chunk) -> nn.Sequential:
    """Two blocks, from the first to the last number of channels, and attention between them."""
    first, inner, last = channels
    middle: list[nn.Module] = [ResnetBlock(first, inner, chunk), ResnetBlock(inner, last, chunk)]
    if uses_attention:
        middle.insert(1, FrameAttention(inner, chunk))
    return nn.Sequential(*middle)


class Encoder(nn.Module):
    """Clips to mean and logarithm of the variance. Arguments as of `WFVAEModel`."""

    def __init__(
        self, latents: int, base: int, blocks: int, flow: int, attends: bool, downsample: Sequence[str]
    ) -> None:
        super().__init__()
        self.chunk = chunk = Chunk()
        first, second = (getattr(layers, name) for name in downsample)
        bands = bands_of(_COLOURS, 3)
        self.down1 = nn.Sequential(
            FrameConv2d(bands, base, 3, padding=1),
            *(ResnetBlock(base, base, None) for _ in range(blocks)),
            first(base, chunk),
        )
        self.down2 = nn.Sequential(
            FrameConv2d(base + flow, 2 * base, 3, padding=1),
            *(ResnetBlock(2 * base, 2 * base, chunk) for _ in range(blocks)),
            second(2 * base, chunk),
        )
        axes_1, axes_2 = map(_axes, downsample)
        self.connect_l1 = FrameConv2d(bands_of(_COLOURS, axes_1), flow, 3, padding=1)
        self.connect_l2 = FrameConv2d(bands_of(_COLOURS, axes_2), flow, 3, padding=1)
        self.mid = _middle((2 * base + flow, 4 * base, 4 * base), attends, chunk)
        self.norm_out = ChannelNorm(4 * base)
        self.conv_out = CausalConv3d(4 * base, 2 * latents, chunk)
        self.wavelet_transform_in = HaarTransform(3, chunk)
        self.wavelet_transform_l1 = HaarTransform(axes_1, chunk)
        self.wavelet_transform_l2 = HaarTransform(axes_2, chunk)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """(B, 3, T, H, W) in −1..1 → (B, 2 · latents, T′, H / 8, W / 8)."""
        bands = self.wavelet_transform_in(frames)
        bands_1 = self.wavelet_transform_l1(bands[:, :_COLOURS])
        bands_2 = self.wavelet_transform_l2(bands_1[:, :_COLOURS])
        made = torch.cat([self.down1(bands), self.connect_l1(bands_1)], dim=1)
        made = torch.cat([self.down2(made), self.connect_l2(bands_2)], dim=1)
        return self.conv_out(F.silu(self.norm_out(self.mid(made))))


class Decoder(nn.Module):
    """Latents to clips. Arguments as of `WFVAEModel`."""

    def __init__(
        self,
        latents: int,
        base: int,
        blocks: int,
        flow: int,
        attends: bool,
        upsample: Sequence[str],
        interpolation: str,
        connections: int,
    ) -> None:
        super().__init__()
        self.chunk = chunk = Chunk()
        self.flow = flow
        first, second = (getattr(layers, name) for name in upsample)
        axes_1, axes_2 = map(_axes, upsample)
        rate = 1 + (axes_2 == 3)  # frames of a latent frame behind the first of the two
        last = rate * (1 + (axes_1 == 3))
        self.conv_in = CausalConv3d(latents, 4 * base, chunk)
        self.mid = _middle((4 * base, 4 * base, 4 * base + flow), attends, chunk)
        self.up2 = nn.Sequential(
            *(ResnetBlock(4 * base, 4 * base, chunk) for _ in range(blocks)),
            second(4 * base, chunk, 1, interpolation),
            ResnetBlock(4 * base, 4 * base + flow, chunk, rate),
        )
        self.up1 = nn.Sequential(
            *(ResnetBlock((2 if at else 4) * base, 2 * base, chunk, rate) for at in range(blocks)),
            first(2 * base, chunk, rate, interpolation),
            ResnetBlock(2 * base, 2 * base, chunk, last),
        )
        self.layer = nn.Sequential(ResnetBlock(2 * base, base, chunk, last), ResnetBlock(base, base, chunk, last))
        self.connect_l1 = self._connection(connections, bands_of(_COLOURS, axes_1), rate)
        self.connect_l2 = self._connection(connections, bands_of(_COLOURS, axes_2), 1)
        self.norm_out = ChannelNorm(base)
        self.conv_out = FrameConv2d(base, bands_of(_COLOURS, 3), 3, padding=1)
        self.inverse_wavelet_transform_out = InverseHaarTransform(3, chunk)
        self.inverse_wavelet_transform_l1 = InverseHaarTransform(axes_1, chunk)
        self.inverse_wavelet_transform_l2 = InverseHaarTransform(axes_2, chunk)

    def _connection(self, blocks: int, bands: int, rate: int) -> nn.Sequential:
        inner = (ResnetBlock(self.flow, self.flow, self.chunk, rate) for _ in range(blocks))
        return nn.Sequential(*inner, FrameConv2d(self.flow, bands, 3, padding=1))

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """(B, C, T, H, W) → (B, 3, T′, 8H, 8W)."""
        made = self.mid(self.conv_in(latents))
        low_2 = self.inverse_wavelet_transform_l2(self.connect_l2(made[:, -self.flow :]))
        made = self.up2(made[:, : -self.flow])
        low_1 = self.inverse_wavelet_transform_l1(low_band(self.connect_l1(made[:, -self.flow :]), low_2))
        made = self.layer(self.up1(made[:, : -self.flow]))
        made = self.conv_out(F.silu(self.norm_out(made)))
        return self.inverse_wavelet_transform_out(low_band(made, low_1))


class WFVAEModel(ModelMixin, ConfigMixin):
    """WF-VAE of Open-Sora Plan 1.3 (4×8×8, 8 channels) and 1.5 (8×8×8, 32 channels). Arguments are the settings of
    released configurations.

    Args:
        latent_dim: Channels of latents.
        base_channels: Of the outermost layers.
        encoder_num_resblocks: Blocks at each size.
        encoder_energy_flow_hidden_size: Channels that carry the low bands around the encoder's layers.
        decoder_num_resblocks: Blocks at each size.
        decoder_energy_flow_hidden_size: Channels that carry the low bands around the decoder's layers.
        attention_type: Attention within each frame.
        use_attention: Whether there is any.
        dropout: 0.
        norm_type: Layer norm over channels.
        t_interpolation: Between frames: `nearest` or `trilinear`.
        connect_res_layer_num: Blocks before each band of the decoder.
        scale: What the channels of latents are multiplied by, behind the shift.
        shift: What is taken from the channels of latents.
        l1_dowmsample_block: The encoder's first one, as released configurations spell it.
        l1_downsample_wavelet: Of the same axes.
        l2_dowmsample_block: The encoder's second one.
        l2_downsample_wavelet: Of the same axes.
        l1_upsample_block: The decoder's last one.
        l1_upsample_wavelet: Of the same axes.
        l2_upsample_block: The decoder's first one.
        l2_upsample_wavelet: Of the same axes.
    """

    _keys_to_ignore_on_load_unexpected = [r".*wavelet_transform_.*"]  # constants

    @register_to_config
    def __init__(
        self,
        latent_dim: int = 8,
        base_channels: int = 128,
        encoder_num_resblocks: int = 2,
        encoder_energy_flow_hidden_size: int = 64,
        decoder_num_resblocks: int = 2,
        decoder_energy_flow_hidden_size: int = 128,
        attention_type: str = "AttnBlock3DFix",
        use_attention: bool = True,
        dropout: float = 0.0,
        norm_type: str = "groupnorm",
        t_interpolation: str = "nearest",
        connect_res_layer_num: int = 1,
        scale: Sequence[float] = (0.18215,) * 8,
        shift: Sequence[float] = (0.0,) * 8,
        l1_dowmsample_block: str = "Downsample",
        l1_downsample_wavelet: str = "HaarWaveletTransform2D",
        l2_dowmsample_block: str = "Spatial2xTime2x3DDownsample",
        l2_downsample_wavelet: str = "HaarWaveletTransform3D",
        l1_upsample_block: str = "Upsample",
        l1_upsample_wavelet: str = "InverseHaarWaveletTransform2D",
        l2_upsample_block: str = "Spatial2xTime2x3DUpsample",
        l2_upsample_wavelet: str = "InverseHaarWaveletTransform3D",
    ) -> None:
        super().__init__()
        downsample, upsample = (l1_dowmsample_block, l2_dowmsample_block), (l1_upsample_block, l2_upsample_block)
        _check(self.config)
        self.encoder = Encoder(
            latent_dim, base_channels, encoder_num_resblocks, encoder_energy_flow_hidden_size, use_attention, downsample
        )
        self.decoder = Decoder(
            latent_dim,
            base_channels,
            decoder_num_resblocks,
            decoder_energy_flow_hidden_size,
            use_attention,
            upsample,
            t_interpolation,
            connect_res_layer_num,
        )
        self.uses_tiling = False

    def enable_tiling(self) -> None:
        """Encode and decode chunk by chunk in time: less memory, and the same result."""
        self.uses_tiling = True

    def encode(
        self, frames: torch.Tensor, return_dict: bool = True
    ) -> AutoencoderKLOutput | tuple[DiagonalGaussianDistribution]:
        """The posterior of clips, (B, C, T′, H / 8, W / 8).

        Args:
            frames: (B, 3, T, H, W) in −1..1, T one more than a multiple of the frames of a latent frame.
            return_dict: Return the class of diffusers' VAEs.
        """
        posterior = DiagonalGaussianDistribution(self._in_chunks(self.encoder, frames, self.encoder_chunk, False))
        if return_dict:
            return AutoencoderKLOutput(latent_dist=posterior)
        return (posterior,)

    def decode(self, latents: torch.Tensor, return_dict: bool = True) -> DecoderOutput | tuple[torch.Tensor]:
        """Clips in −1..1, (B, 3, T, 8H, 8W).

        Args:
            latents: (B, C, T′, H, W) as `encode` gives them: neither shifted nor scaled.
            return_dict: Return the class of diffusers' VAEs.
        """
        frames = self._in_chunks(self.decoder, latents, self.decoder_chunk, True)
        if return_dict:
            return DecoderOutput(sample=frames)
        return (frames,)

    encoder_chunk: int = 8
    """Frames of a chunk, behind the first one, which is a chunk of its own."""
    decoder_chunk: int = 2
    """Latent frames of a chunk, behind the first one."""

    @property
    def temporal_ratio(self) -> int:
        """Frames of a latent frame."""
        names = (self.config.l1_dowmsample_block, self.config.l2_dowmsample_block)
        return 2 ** (1 + sum(name.startswith(_IN_TIME) for name in names))

    def _in_chunks(self, half: Encoder | Decoder, clip: torch.Tensor, size: int, looks_ahead: bool) -> torch.Tensor:
        """What an encoder or a decoder makes of a clip, of the whole at once or of chunks one by one."""
        frames = clip.shape[2]
        made = []
        for start, end in _chunks(frames, size) if self.uses_tiling else ((0, frames),):
            more = looks_ahead and end < frames
            half.chunk.is_first, half.chunk.looks_ahead = start == 0, more
            part = half(clip[:, :, start : end + more])
            made.append(part[:, :, : part.shape[2] - self.temporal_ratio * more])
        for module in half.modules():
            if isinstance(module, layers.Remembering):
                module.past = None
        return torch.cat(made, dim=2)


def _chunks(frames: int, size: int) -> Iterator[tuple[int, int]]:
    """Starts and ends: the first frame alone, then `size` at a time."""
    yield 0, 1
    for start in range(1, frames, size):
        yield start, min(start + size, frames)


def _check(config: Any) -> None:
    """Raise `ValueError` for settings that no release has."""
    known: dict[str, Sequence[Any]] = {"norm_type": _NORMS, "attention_type": _ATTENTIONS, "dropout": (0.0,)}
    for end, before in (("dowmsample", "Downsample"), ("upsample", "Upsample")):
        known |= {f"l1_{end}_block": (before, _IN_TIME + before), f"l2_{end}_block": (_IN_TIME + before,)}
    for name, values in known.items():
        if config[name] not in values:
            raise ValueError(f"{name} is {config[name]!r}, and releases have {' or '.join(map(repr, values))}")
    for block, wavelet in (("l1_dowmsample", "l1_downsample"), ("l1_upsample", "l1_upsample")):
        axes = _axes(config[f"{block}_block"])
        if not config[f"{wavelet}_wavelet"].endswith(f"{axes}D"):
            raise ValueError(f"{wavelet}_wavelet is not of the {axes} axes of {config[f'{block}_block']}")
    if not len(config["scale"]) == len(config["shift"]) == config["latent_dim"]:
        raise ValueError(f"scale and shift have not one number for each of {config['latent_dim']} channels")
    if 0 in config["scale"]:
        raise ValueError("a scale of 0 leaves nothing of a channel")
