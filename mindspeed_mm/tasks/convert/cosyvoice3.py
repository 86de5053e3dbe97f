"""Converts CosyVoice3's release to a model folder, and a model folder back to the release's `llm.pt`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import mindspeed_mm.fsdp.models.cosyvoice3 as family
from mindspeed_mm.checkpoint.conversion.files import PtFile, SafetensorsFile
from mindspeed_mm.checkpoint.conversion.ledger import SourceLedger
from mindspeed_mm.checkpoint.conversion.run import Conversion, Converted, Writing, convert
from mindspeed_mm.checkpoint.cosyvoice3_release import (
    BASE,
    FLOW,
    LANGUAGE_MODEL,
    SAVED_VOICES,
    SOUND_FILES,
    VOCODER,
    is_cosyvoice3_release,
)
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.checkpoint.original.reading import pt_tensors
from mindspeed_mm.checkpoint.pt_files import load_weights
from mindspeed_mm.checkpoint.safetensors_folder import MAPPED_BYTES, open_weights
from mindspeed_mm.core.errors import ModelFolderError, UsageError, first_names
from mindspeed_mm.core.json_file import JsonObject, read_json_object
from mindspeed_mm.core.terminal import say
from mindspeed_mm.fsdp.utils.finite import is_finite
from mindspeed_mm.fsdp.utils.processor import load_processor

HEAD, EMBEDDING = "llm.model.lm_head.weight", "llm.model.model.embed_tokens.weight"
_SPEECH = "speech_embedding.weight"
EXTRA_ROWS = 200
"""Rows of the released speech embedding after the tokens of the codec."""
_SPECIAL_TOKENS = Path(family.__file__).with_name("special_tokens.txt")
"""Tokens that the release adds to Qwen2's tokenizer, in the order of their ids (FunAudioLLM/CosyVoice,
`tokenizer/tokenizer.py`): prompt marks, sounds, English phonemes, Chinese initials and finals."""
_END, _PADDING = "<|endoftext|>", "<|endoftext|>"


def release_to_hf(release: Path, target: Path, writing: Writing) -> Converted:
    """Write the release as a model folder: safetensors, config.json and the tokenizer. Files of sound are copied.

    Args:
        release: The folder as downloaded.
        target: The folder to write.
        writing: How to write and verify.

    Raises:
        CheckpointError: `llm.pt` or a file of sound is broken.
        ModelFolderError: A file is missing, or the weights are of another model.
        UsageError: The target must not be written.
    """
    path = release / LANGUAGE_MODEL
    ledger = SourceLedger(pt_tensors(path), path)
    tensors: dict[str, LazyTensor] = dict(ledger.tensors)
    _check_names(tensors, path)
    # a release may store a tied head as a tensor of its own
    tied = HEAD not in tensors or torch.equal(tensors[HEAD].read(), tensors[EMBEDDING].read())
    left_out = {}
    if tied and tensors.pop(HEAD, None) is not None:
        left_out[HEAD] = "the embedding of text once more"
    sound = _sound_files(release)
    _check_sound(sound, release)
    with TemporaryDirectory() as drawer:
        tokenizer_files = _write_tokenizer(release / BASE, Path(drawer))
        conversion = Conversion(
            sources=[release],
            ledgers=[ledger],
            files={"model.safetensors": SafetensorsFile(tensors)},
            layout={"kind": "hf"},
            left_out=left_out,
            copies=tokenizer_files | sound,
            texts={"config.json": json.dumps(_config(release, tensors, tied=tied), indent=2) + "\n"},
        )
        return convert(conversion, target, replace(writing, examine=None), stream=sys.stderr)


def hf_to_release(folder: Path, target: Path, release: Path | None, writing: Writing) -> Converted:
    """Write the weights of a model folder as `llm.pt`, which CosyVoice's own code loads.

    Args:
        folder: The model folder.
        target: The folder to write.
        release: A release whose other files are copied; None: only the files of sound of the model folder.
        writing: How to write and verify.

    Raises:
        ModelFolderError: The folder has no weights.
        UsageError: The target must not be written, or `release` is not the release.
    """
    if release is not None and not is_cosyvoice3_release(release):
        what, way_out = "is not CosyVoice3's release", "Name the folder as it was downloaded, or leave it out."
        raise UsageError(what, where=str(release), key="--model", way_out=way_out)
    copies = _sound_files(folder)
    if release is not None:
        others = (path for path in release.iterdir() if path.name != LANGUAGE_MODEL and not path.name.startswith("."))
        copies |= {path.name: path for path in sorted(others)}
    with open_weights(folder, MAPPED_BYTES) as stored:
        ledger = SourceLedger(stored, folder)
        tensors: dict[str, LazyTensor] = dict(ledger.tensors)
        _check_names(tensors, folder)
        tied = HEAD not in tensors
        if tied:
            tensors[HEAD] = tensors[EMBEDDING]
        conversion = Conversion(
            sources=[folder, *([release] if release else [])],
            ledgers=[ledger],
            files={LANGUAGE_MODEL: PtFile({"": tensors})},
            layout={"kind": "cosyvoice3"},
            times={EMBEDDING: 2} if tied else {},
            copies=copies,
        )
        return convert(conversion, target, replace(writing, examine=None), stream=sys.stderr)


def _check_names(tensors: Mapping[str, LazyTensor], where: Path) -> None:
    """Raise `ModelFolderError` for the weights of another model."""
    missing = [name for name in (EMBEDDING, _SPEECH) if name not in tensors]
    if missing:
        way_out = "Name weights of CosyVoice3's language model."
        raise ModelFolderError(f"has no weight {missing[0]}", where=str(where), way_out=way_out)


def _check_sound(files: Mapping[str, Path], release: Path) -> None:
    """Report what is missing to speak, and weights that are not finite.

    Raises:
        CheckpointError: A file is broken, which a copy would be as well.
    """
    for name in (FLOW, VOCODER, SAVED_VOICES):
        if name in files:
            content = load_weights(files[name])
            tensors = content.items() if isinstance(content, dict) else ()
            bad = [key for key, each in tensors if isinstance(each, torch.Tensor) and not is_finite(each)]
            if bad:
                say(f"warning: NaN or infinity in {first_names(bad)} of {files[name]}", err=True)
        elif name != SAVED_VOICES:
            say(f"note: {release} has no file {name}: the folder can be trained, and does not speak", err=True)


def _sound_files(folder: Path) -> dict[str, Path]:
    return {name: folder / name for name in SOUND_FILES if (folder / name).is_file()}


def _config(release: Path, tensors: Mapping[str, LazyTensor], *, tied: bool) -> JsonObject:
    """`config.json`, with sizes taken from the weights."""
    base = read_json_object(release / BASE / "config.json", ModelFolderError)
    kept = {name: value for name, value in base.items() if not name.startswith("_")}
    return {
        "architectures": ["CosyVoice3LM"],
        "model_type": "cosyvoice3",
        "llm_config": kept | {"tie_word_embeddings": tied, "vocab_size": tensors[EMBEDDING].shape[0]},
        "speech_token_size": tensors[_SPEECH].shape[0] - EXTRA_ROWS,
        "extra_speech_rows": EXTRA_ROWS,
        "mix_ratio": [5, 15],
        "tie_word_embeddings": tied,
        "dtype": str(tensors[EMBEDDING].dtype).removeprefix("torch."),
    }


def _write_tokenizer(base: Path, drawer: Path) -> dict[str, Path]:
    """Write the release's tokenizer; returns its files by name."""
    tokenizer: Any = load_processor(base)
    tokenizer.add_tokens(_SPECIAL_TOKENS.read_text(encoding="utf-8").split(), special_tokens=True)
    tokenizer.eos_token, tokenizer.pad_token = _END, _PADDING
    tokenizer.save_pretrained(drawer)
    return {path.name: path for path in sorted(drawer.iterdir())}
