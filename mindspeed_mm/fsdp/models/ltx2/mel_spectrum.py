"""The spectrum that LTX-2's VAE of sound reads: as Lightricks' training and diffusers' modular pipelines compute it."""

from __future__ import annotations

import numpy as np
import torch

_WINDOW = 1024
"""Samples of a Fourier transform; in no configuration."""
_LEAST = 1e-5
"""What amplitudes are raised to before their logarithm is taken."""


def log_mel(wave: torch.Tensor, sampling_rate: int, hop: int, bins: int) -> torch.Tensor:
    """The logarithm of the amplitudes in bands of Slaney's mel scale, each normalised by its width.

    Args:
        wave: (..., samples) in -1..1.
        sampling_rate: Samples a second.
        hop: Samples from one frame to the next; frame k is centred on sample k · hop, the ends are mirrored.
        bins: Bands between 0 and half the sampling rate.

    Returns:
        (..., frames, bins) with samples // hop + 1 frames, in the type of the wave.
    """
    window = torch.hann_window(_WINDOW, dtype=wave.dtype, device=wave.device)
    spectrum = torch.stft(
        wave.flatten(0, -2), _WINDOW, hop, window=window, center=True, pad_mode="reflect", return_complex=True
    )
    filters = torch.from_numpy(_filters(sampling_rate, bins)).to(wave.device)
    mel = spectrum.abs().double().transpose(1, 2) @ filters
    return mel.clamp(min=_LEAST).log().to(wave.dtype).unflatten(0, wave.shape[:-1])


def _filters(sampling_rate: int, bins: int) -> np.ndarray:
    from transformers.audio_utils import mel_filter_bank  # seconds to import

    half = sampling_rate / 2
    filters: np.ndarray = mel_filter_bank(
        _WINDOW // 2 + 1, bins, 0.0, half, sampling_rate, norm="slaney", mel_scale="slaney"
    )
    return filters
