"""Fun-ASR-Nano's feature extractor without torchaudio, which does not load beside every torch.

transformers asks torchaudio for one thing, Kaldi's filterbank; the frames of a low rate that it stacks are its own.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.fsdp.utils.kaldi_fbank import log_mel

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
