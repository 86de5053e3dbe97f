"""The spectrum that Qwen3-TTS's speaker encoder hears and CosyVoice3 continues: log magnitudes in mel bands, fp64."""

from __future__ import annotations

from functools import cache

import numpy as np

RATE = 24000
"""Samples a second."""
_HIGHEST_HZ = 12000.0
_FLOOR, _LEAST_POWER = 1e-5, 1e-9


def speaker_mel(samples: np.ndarray, bands: int, size: int = 1024, hop: int = 256) -> np.ndarray:
    """Hann windows, reflected at both ends; Slaney's mel bands up to 12 kHz. The defaults are Qwen3-TTS's.

    Args:
        samples: (N,) of one channel at 24 kHz, more than (size - hop) / 2.
        bands: Number of mel bands.
        size: Samples of a window.
        hop: Samples from one window to the next.

    Returns:
        (frames, bands) float32.
    """
    border = (size - hop) // 2
    padded = np.pad(samples.astype(np.float64), border, mode="reflect")
    frames_FN = np.lib.stride_tricks.sliding_window_view(padded, size)[::hop]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)
    power_FK = np.abs(np.fft.rfft(frames_FN * window)) ** 2
    mel_FB = np.sqrt(power_FK + _LEAST_POWER) @ _bands(bands, size)
    return np.log(np.maximum(mel_FB, _FLOOR)).astype(np.float32)


@cache
def _bands(bands: int, size: int) -> np.ndarray:
    """Weights of triangular mel filters, (size / 2 + 1, bands), on Slaney's scale from 0 to `_HIGHEST_HZ`."""
    from transformers.audio_utils import mel_filter_bank  # seconds to import

    return mel_filter_bank(size // 2 + 1, bands, 0.0, _HIGHEST_HZ, RATE, norm="slaney", mel_scale="slaney")
