"""The spectrum that Qwen3-TTS's speaker encoder hears: log magnitudes in mel bands, computed in fp64."""

from __future__ import annotations

from functools import cache

import numpy as np

RATE = 24000
"""Samples a second."""
_SIZE, _HOP = 1024, 256
_HIGHEST_HZ = 12000.0
_FLOOR, _LEAST_POWER = 1e-5, 1e-9


def speaker_mel(samples: np.ndarray, bands: int) -> np.ndarray:
    """Hann windows of 1024 samples every 256, reflected at both ends; Slaney's mel bands up to 12 kHz.

    Args:
        samples: (N,) of one channel at 24 kHz, at least 385.
        bands: Number of mel bands.

    Returns:
        (frames, bands) float32.
    """
    border = (_SIZE - _HOP) // 2
    padded = np.pad(samples.astype(np.float64), border, mode="reflect")
    frames_FN = np.lib.stride_tricks.sliding_window_view(padded, _SIZE)[::_HOP]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_SIZE) / _SIZE)
    power_FK = np.abs(np.fft.rfft(frames_FN * window)) ** 2
    mel_FB = np.sqrt(power_FK + _LEAST_POWER) @ _bands(bands)
    return np.log(np.maximum(mel_FB, _FLOOR)).astype(np.float32)


@cache
def _bands(bands: int) -> np.ndarray:
    """Return the weights of triangular mel filters, (513, bands), on Slaney's scale from 0 to `_HIGHEST_HZ`."""
    from transformers.audio_utils import mel_filter_bank  # seconds to import

    return mel_filter_bank(_SIZE // 2 + 1, bands, 0.0, _HIGHEST_HZ, RATE, norm="slaney", mel_scale="slaney")
