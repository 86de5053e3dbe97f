"""Fun-ASR-Nano's feature extractor without torchaudio, which does not load beside every torch.

transformers asks torchaudio for one thing, Kaldi's filterbank; the frames of a low rate that it stacks are its own.
The filterbank stands here in plain numpy. The steps and their order are those of Kaldi's `compute-fbank-feats` without
dither: frames that lie wholly inside the sound, mean taken off, pre-emphasis, window, power spectrum, triangles on the
mel scale, logarithm.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

NAME = "FunAsrNanoFeatureExtractor"
_PACKAGE = "transformers.models.fun_asr_nano"
_FILES = ("processor_config.json", "preprocessor_config.json")


def asks_for_it(folder: Path) -> bool:
    """Whether a model folder names this feature extractor."""
    return any(
        NAME in path.read_text(encoding="utf-8", errors="replace")
        for path in map(folder.joinpath, _FILES)
        if path.is_file()
    )


def provide_fun_asr_features() -> None:
    """Put a feature extractor that needs no torchaudio where transformers (5.23) has a placeholder for its own, which
    raises when it is used. Nothing is done where the own one works, or where transformers has no such model.

    The first import of `transformers.processing_utils` runs transformers' `__init__` once more and puts another module
    into `sys.modules`. It comes before, so that the class stands in the module that stays, and in the one before it.
    """
    first = importlib.import_module("transformers")  # seconds
    importlib.import_module("transformers.processing_utils")
    if importlib.util.find_spec(_PACKAGE) is None:
        return
    for module in (first, *map(importlib.import_module, ("transformers", _PACKAGE))):
        if getattr(getattr(module, NAME), "is_dummy", False):
            setattr(module, NAME, _without_torchaudio())


def __getattr__(name: str) -> Any:
    """The class, made when it is asked for: a worker that is sent a processor looks it up here."""
    if name == NAME:
        return _without_torchaudio()
    raise AttributeError(name)


@cache
def _without_torchaudio() -> type:
    """A class of the very name of transformers' own: a folder's files name it, and what is saved names it again."""
    stock: Any = getattr(importlib.import_module(f"{_PACKAGE}.feature_extraction_fun_asr_nano"), NAME)
    return type(NAME, (stock,), {"_extract_fbank_features": _filterbank, "__module__": __name__})


def _filterbank(extractor: Any, waveform: torch.Tensor) -> torch.Tensor:
    """(N,) samples → (frames, mel bands)."""
    if extractor.window != "hamming":
        raise ValueError(f"the window '{extractor.window}' needs torchaudio; 'hamming' does not")
    bands = log_mel(
        waveform.numpy(),
        rate=extractor.sampling_rate,
        bands=extractor.feature_size,
        frame_ms=extractor.frame_length,
        shift_ms=extractor.frame_shift,
    )
    if not len(bands):
        raise ValueError(f"the sound is shorter than a frame of {extractor.frame_length} ms")
    return torch.from_numpy(bands).to(waveform.dtype)


# --- Kaldi's log-mel filterbank ---------------------------------------------------------------------------------------


PREEMPHASIS = 0.97
LOWEST_HZ = 20.0
FLOOR = float(np.finfo(np.float32).eps)
"""The least energy of a band, before its logarithm."""
_HAMMING = (0.54, 0.46)


def log_mel(samples: np.ndarray, *, rate: int, bands: int, frame_ms: float, shift_ms: float) -> np.ndarray:
    """The log energies of a sound in mel bands, computed in fp64.

    Args:
        samples: (N,) of one channel.
        rate: Samples a second.
        bands: Number of mel bands between 20 Hz and half the rate.
        frame_ms: Length of a frame in milliseconds.
        shift_ms: From the start of a frame to that of the next one.

    Returns:
        (frames, bands) float64; no frames where the sound is shorter than one.
    """
    length, shift = int(rate * frame_ms / 1000), int(rate * shift_ms / 1000)
    if len(samples) < length:
        return np.zeros((0, bands))
    frames_FN = np.lib.stride_tricks.sliding_window_view(samples.astype(np.float64), length)[::shift]
    frames_FN = frames_FN - frames_FN.mean(axis=1, keepdims=True)
    earlier_FN = np.concatenate([frames_FN[:, :1], frames_FN[:, :-1]], axis=1)  # the first sample stands before itself
    frames_FN = (frames_FN - PREEMPHASIS * earlier_FN) * _window(length)
    size = 1 << (length - 1).bit_length()
    power_FK = np.abs(np.fft.rfft(frames_FN, size)) ** 2
    return np.log(np.maximum(power_FK @ _triangles(bands, size, rate).T, FLOOR))


@cache
def _window(length: int) -> np.ndarray:
    """Return the symmetric Hamming window of `length` samples, (length,) float64."""
    mean, swing = _HAMMING
    return mean - swing * np.cos(2 * np.pi * np.arange(length) / (length - 1))


@cache
def _triangles(bands: int, size: int, rate: int) -> np.ndarray:
    """(bands, size / 2 + 1) weights. The triangles are equally wide in mel, each reaching to its neighbours' peaks."""
    borders = np.linspace(_mel(LOWEST_HZ), _mel(rate / 2), bands + 2)
    left, peak, right = borders[:-2, None], borders[1:-1, None], borders[2:, None]
    bins = _mel(np.arange(size // 2) * rate / size)[None]
    rising, falling = (bins - left) / (peak - left), (right - bins) / (right - peak)
    weights = np.maximum(0.0, np.minimum(rising, falling))
    return np.pad(weights, ((0, 0), (0, 1)))  # the bin at half the rate belongs to no band


def _mel(hertz: np.ndarray | float) -> np.ndarray:
    return 1127.0 * np.log1p(np.asarray(hertz) / 700.0)
