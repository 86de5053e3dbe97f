"""Files of CosyVoice3's release, Fun-CosyVoice3-0.5B-2512, and which of them a model folder here keeps; no torch."""

from __future__ import annotations

from pathlib import Path

LANGUAGE_MODEL, BASE = "llm.pt", "CosyVoice-BlankEN"
"""Weights of the language model; folder with configuration and tokenizer of the Qwen2 that it is built on."""
FLOW, VOCODER = "flow.pt", "hift.pt"
CAMPPLUS, SPEECH_TOKENIZER = "campplus.onnx", "speech_tokenizer_v3.onnx"
"""What makes a speaker vector, and speech tokens, of a recording."""
SAVED_VOICES = "spk2info.pt"
"""Not in the release: CosyVoice writes voices there that are saved by name."""
SOUND_FILES = (FLOW, VOCODER, CAMPPLUS, SPEECH_TOKENIZER, SAVED_VOICES)
"""Lie in a model folder as they are released."""


def is_cosyvoice3_release(path: Path) -> bool:
    """Whether a folder is the release as it was downloaded."""
    return (path / LANGUAGE_MODEL).is_file() and (path / BASE).is_dir() and not (path / "config.json").exists()
