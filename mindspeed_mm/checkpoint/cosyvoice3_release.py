"""Files of CosyVoice3's release, Fun-CosyVoice3-0.5B-2512, and those that a model folder keeps; no torch."""

from __future__ import annotations

from pathlib import Path

LANGUAGE_MODEL, BASE = "llm.pt", "CosyVoice-BlankEN"
"""Weights of the language model; folder with configuration and tokenizer of its base, Qwen2."""
FLOW, VOCODER = "flow.pt", "hift.pt"
CAMPPLUS, SPEECH_TOKENIZER = "campplus.onnx", "speech_tokenizer_v3.onnx"
"""Networks that compute a speaker vector and speech tokens of a recording."""
SAVED_VOICES = "spk2info.pt"
"""Voices that were saved by name; not part of the release."""
SOUND_FILES = (FLOW, VOCODER, CAMPPLUS, SPEECH_TOKENIZER, SAVED_VOICES)
"""Files that a model folder contains unchanged."""


def is_cosyvoice3_release(path: Path) -> bool:
    """Whether a folder is the release as downloaded."""
    return (path / LANGUAGE_MODEL).is_file() and (path / BASE).is_dir() and not (path / "config.json").exists()
