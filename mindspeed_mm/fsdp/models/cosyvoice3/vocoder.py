"""CosyVoice3's vocoder: from mel frames to a wave, by a causal HiFT (HiFTNet, arXiv:2309.09493).

A predictor estimates the pitch of each frame. Its harmonics form a source signal, which is added at each stage of an
upsampling network that ends in an inverse short-time Fourier transform. Module names are those of the released
`hift.pt`, whose convolutions are parametrised by weight norm. Shapes: T mel frames, M mel bins, C channels, L length of
a signal, W samples, H harmonics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

_LOUDEST = 1e2
"""Upper limit of magnitudes in the inverse transform."""
_LAST_SLOPE = 0.01
"""Slope of the last leaky ReLU. The release uses PyTorch's default there."""
_LEAST_FREQUENCY = 1e-9
"""Added to the frequency that Snake divides by."""
_NOISE_SEED = 0


@dataclass(frozen=True)
class VocoderSizes:
    """Sizes under the names of CosyVoice's own YAML; the defaults are the release's, Fun-CosyVoice3-0.5B-2512.

    `config.json` of a model folder may hold others as `hift_config`.
    """

    in_channels: int = 80
    """Mel bins."""
    base_channels: int = 512
    nb_harmonics: int = 8
    """Number of overtones."""
    sampling_rate: int = 24_000
    nsf_alpha: float = 0.1
    """Amplitude of the source."""
    nsf_sigma: float = 0.003
    """Amplitude of its noise in voiced frames."""
    nsf_voiced_threshold: float = 10
    """Lowest pitch of a voiced frame, in Hz."""
    upsample_rates: Sequence[int] = (8, 5, 3)
    upsample_kernel_sizes: Sequence[int] = (16, 11, 7)
    n_fft: int = 16
    hop_len: int = 4
    resblock_kernel_sizes: Sequence[int] = (3, 7, 11)
    source_resblock_kernel_sizes: Sequence[int] = (7, 7, 11)
    resblock_dilations: Sequence[int] = (1, 3, 5)
    lrelu_slope: float = 0.1
    audio_limit: float = 0.99
    conv_pre_look_right: int = 4
    """Number of following mel frames that the wave depends on."""
    f0_cond_channels: int = 512

    @property
    def samples_a_frame(self) -> int:
        """Number of samples per mel frame."""
        return math.prod(self.upsample_rates) * self.hop_len


class CausalConv(nn.Conv1d):
    """A convolution that sees only the past, or only the future, and keeps the length.

    Args:
        inputs: Channels of the input.
        outputs: Channels of the output.
        kernel: Kernel size.
        dilation: Step between kernel elements.
        ahead: See the future instead of the past.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, *, dilation: int = 1, ahead: bool = False) -> None:
        super().__init__(inputs, outputs, kernel, dilation=dilation)
        others = (kernel - 1) * dilation
        self._border = (0, others) if ahead else (others, 0)

    def forward(self, signal_BCL: torch.Tensor) -> torch.Tensor:
        """(B, C, L) → (B, C', L)."""
        return super().forward(F.pad(signal_BCL, self._border))


class CausalUpsampling(nn.Conv1d):
    """Nearest-neighbour upsampling, then a causal convolution.

    Args:
        inputs: Channels of the input.
        outputs: Channels of the output.
        kernel: Kernel size.
        rate: Upsampling factor.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, rate: int) -> None:
        super().__init__(inputs, outputs, kernel)
        self._rate = rate

    def forward(self, signal_BCL: torch.Tensor) -> torch.Tensor:
        """(B, C, L) → (B, C', rate · L)."""
        repeated = signal_BCL.repeat_interleave(self._rate, dim=-1)
        return super().forward(F.pad(repeated, (self.kernel_size[0] - 1, 0)))


class CausalDownsampling(nn.Conv1d):
    """A causal convolution with a stride.

    Args:
        inputs: Channels of the input.
        outputs: Channels of the output.
        rate: Downsampling factor.
    """

    def __init__(self, inputs: int, outputs: int, rate: int) -> None:
        super().__init__(inputs, outputs, kernel_size=1 if rate == 1 else 2 * rate, stride=rate)

    def forward(self, signal_BCL: torch.Tensor) -> torch.Tensor:
        """(B, C, L + 1) → (B, C', L / rate); with rate 1 the length stays."""
        return super().forward(F.pad(signal_BCL, (self.stride[0] - 1, 0)))


class Snake(nn.Module):
    """x + sin²(αx) / α with one α per channel (arXiv:2006.08195).

    Args:
        channels: Channels of the signal.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(channels))

    def forward(self, signal_BCL: torch.Tensor) -> torch.Tensor:
        """(B, C, L) → (B, C, L)."""
        alpha = self.alpha[:, None]
        return signal_BCL + (signal_BCL * alpha).sin().square() / (alpha + _LEAST_FREQUENCY)


class ResidualBlock(nn.Module):
    """Residual pairs of convolutions; the first one of each pair is dilated.

    Args:
        channels: Channels of the signal.
        kernel: Kernel size.
        dilations: Dilation of each pair.
    """

    def __init__(self, channels: int, kernel: int, dilations: Sequence[int]) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(weight_norm(CausalConv(channels, channels, kernel, dilation=d)) for d in dilations)
        self.convs2 = nn.ModuleList(weight_norm(CausalConv(channels, channels, kernel)) for _ in dilations)
        self.activations1 = nn.ModuleList(Snake(channels) for _ in dilations)
        self.activations2 = nn.ModuleList(Snake(channels) for _ in dilations)

    def forward(self, signal_BCL: torch.Tensor) -> torch.Tensor:
        """(B, C, L) → (B, C, L)."""
        for pair in zip(self.activations1, self.convs1, self.activations2, self.convs2, strict=True):
            added = signal_BCL
            for part in pair:
                added = part(added)
            signal_BCL = signal_BCL + added
        return signal_BCL


class PitchPredictor(nn.Module):
    """Estimates the pitch of each mel frame, looking three frames ahead.

    Args:
        sizes: Of the model.
    """

    def __init__(self, sizes: VocoderSizes) -> None:
        super().__init__()
        width = sizes.f0_cond_channels
        layers: list[nn.Module] = [weight_norm(CausalConv(sizes.in_channels, width, 4, ahead=True)), nn.ELU()]
        for _ in range(4):
            layers += [weight_norm(CausalConv(width, width, 3)), nn.ELU()]
        self.condnet = nn.Sequential(*layers)
        self.classifier = nn.Linear(width, 1)

    def forward(self, mel_BMT: torch.Tensor) -> torch.Tensor:
        """(B, M, T) → (B, T) in Hz."""
        pitch: torch.Tensor = self.classifier(self.condnet(mel_BMT).transpose(1, 2))
        return pitch.squeeze(-1).abs()


class HarmonicSource(nn.Module):
    """A sum of sines at multiples of the pitch plus a little noise; in unvoiced frames noise alone.

    As in the release at inference, sines are constant within a frame, and the noise is uniform in 0..1 and the same in
    each call.

    Args:
        sizes: Of the model.
    """

    def __init__(self, sizes: VocoderSizes) -> None:
        super().__init__()
        self._sizes = sizes
        self.l_linear = nn.Linear(sizes.nb_harmonics + 1, 1)

    def forward(self, pitch_BT: torch.Tensor) -> torch.Tensor:
        """(B, T) in Hz → (B, 1, W)."""
        sizes = self._sizes
        multiples = torch.arange(1, sizes.nb_harmonics + 2, device=pitch_BT.device, dtype=pitch_BT.dtype)
        # Whole turns change no sine: they are dropped before the sum, as in the release.
        turns_BTH = (pitch_BT[..., None] * multiples / sizes.sampling_rate) % 1
        phases_BTH = turns_BTH.cumsum(dim=1) * (2 * math.pi) * sizes.samples_a_frame
        sines_BTH = sizes.nsf_alpha * phases_BTH.sin()
        is_voiced = (pitch_BT > sizes.nsf_voiced_threshold)[..., None].to(pitch_BT.dtype)
        loudness_BT1 = is_voiced * sizes.nsf_sigma + (1 - is_voiced) * sizes.nsf_alpha / 3
        voiced_BWH, loudness_BW1 = (
            part.repeat_interleave(sizes.samples_a_frame, dim=1) for part in (sines_BTH * is_voiced, loudness_BT1)
        )
        source_BW1: torch.Tensor = self.l_linear(voiced_BWH + loudness_BW1 * self._noise(voiced_BWH)).tanh()
        return source_BW1.transpose(1, 2)

    def _noise(self, like_BWH: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(_NOISE_SEED)
        return torch.rand(like_BWH.shape[1:], generator=generator).to(like_BWH)


class CosyVoice3Vocoder(nn.Module):
    """Generates a wave from mel frames.

    Args:
        sizes: Of the model.
    """

    def __init__(self, sizes: VocoderSizes) -> None:
        super().__init__()
        self.sizes = sizes
        widths = [sizes.base_channels // 2**stage for stage in range(len(sizes.upsample_rates) + 1)]
        spectrum = sizes.n_fft + 2  # real and imaginary parts of n_fft / 2 + 1 frequencies
        self.f0_predictor = PitchPredictor(sizes)
        self.m_source = HarmonicSource(sizes)
        first = CausalConv(sizes.in_channels, widths[0], sizes.conv_pre_look_right + 1, ahead=True)
        self.conv_pre = weight_norm(first)
        self.ups, self.source_downs = nn.ModuleList(), nn.ModuleList()
        self.source_resblocks, self.resblocks = nn.ModuleList(), nn.ModuleList()
        for stage, (rate, kernel) in enumerate(zip(sizes.upsample_rates, sizes.upsample_kernel_sizes, strict=True)):
            width, rest = widths[stage + 1], math.prod(sizes.upsample_rates[stage + 1 :])
            self.ups.append(weight_norm(CausalUpsampling(widths[stage], width, kernel, rate)))
            self.source_downs.append(CausalDownsampling(spectrum, width, rest))
            of_source = sizes.source_resblock_kernel_sizes[stage]
            self.source_resblocks.append(ResidualBlock(width, of_source, sizes.resblock_dilations))
            for of_block in sizes.resblock_kernel_sizes:
                self.resblocks.append(ResidualBlock(width, of_block, sizes.resblock_dilations))
        self.conv_post = weight_norm(CausalConv(widths[-1], spectrum, 7))

    @torch.no_grad()
    def forward(self, mel_TM: torch.Tensor) -> torch.Tensor:
        """(T, M) → (W,) in -`audio_limit`..`audio_limit`, `samples_a_frame` samples a frame."""
        mel_BMT = mel_TM.T[None]
        pitch_BT = self._pitch(mel_BMT)
        return self._decode(mel_BMT, self.m_source(pitch_BT))[0]

    def _pitch(self, mel_BMT: torch.Tensor) -> torch.Tensor:
        """Pitch in fp64 as in the release, since phases accumulate its errors. It runs on the CPU because not all
        devices support fp64."""
        predictor = self.f0_predictor.to("cpu", torch.float64)
        pitch: torch.Tensor = predictor(mel_BMT.to("cpu", torch.float64))
        return pitch.to(mel_BMT)

    def _decode(self, mel_BMT: torch.Tensor, source_B1W: torch.Tensor) -> torch.Tensor:
        sizes, kinds = self.sizes, len(self.sizes.resblock_kernel_sizes)
        window = torch.hann_window(sizes.n_fft, dtype=mel_BMT.dtype, device=mel_BMT.device)
        transform = torch.stft(source_B1W[:, 0], sizes.n_fft, sizes.hop_len, window=window, return_complex=True)
        spectrum = torch.cat((transform.real, transform.imag), dim=1)
        signal: torch.Tensor = self.conv_pre(mel_BMT)
        for stage, upsample in enumerate(self.ups):
            signal = upsample(F.leaky_relu(signal, sizes.lrelu_slope))
            if stage == len(self.ups) - 1:
                signal = F.pad(signal, (1, 0), mode="reflect")  # the transform has one frame more than hops
            signal = signal + self.source_resblocks[stage](self.source_downs[stage](spectrum))
            blocks = self.resblocks[stage * kinds : (stage + 1) * kinds]
            signal = torch.stack([block(signal) for block in blocks]).sum(dim=0) / kinds
        last = self.conv_post(F.leaky_relu(signal, _LAST_SLOPE))
        magnitude, phase = last.tensor_split((sizes.n_fft // 2 + 1,), dim=1)
        # The network predicts log-magnitudes, and phases through a sine.
        made = torch.polar(magnitude.exp().clamp(max=_LOUDEST), phase.sin())
        wave = torch.istft(made, sizes.n_fft, sizes.hop_len, window=window)
        return wave.clamp(-sizes.audio_limit, sizes.audio_limit)
