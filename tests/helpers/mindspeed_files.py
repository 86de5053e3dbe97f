"""Tiny folders of the models that MindSpeed-MM's files name, made without this package's code, and rows for each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.helpers.packed_families import FAMILIES as MODELS
from tests.helpers.packed_more_families import MORE as MORE_MODELS
from tests.helpers.released_rows import ROWS, rows_of
from tests.helpers.tiny_more_processors import MORE as MORE_PROCESSORS
from tests.helpers.tiny_processors import FAMILIES as PROCESSORS
from tests.helpers.tiny_processors import PATCH_SIZE
from tests.helpers.tiny_run import make_rows
from tests.helpers.tiny_sounds import sound_bytes, tone

RELEASED = {name: ROWS[name] for name in ("qwen3tts", "step3_vl")}
_PROCESSOR_OF = {"qwen3_5_moe": "qwen3_5", "qwen3_vl_moe": "qwen3_vl"}
_TOKEN_OF = {
    "image_token": "image_token",
    "video_token": "video_token",
    "audio_token": "audio_token",
    "vision_start_token": "vision_start_token",
    "vision_end_token": "vision_end_token",
    "audio_start_token": "audio_bos_token",
    "audio_end_token": "audio_eos_token",
}
"""Key of a configuration, without `_id` or `_index` → attribute of the tokenizer."""


def make_folder(name: str, folder: Path) -> Path:
    """A folder of the family with random fp32 weights and its processor."""
    if name in RELEASED:
        return RELEASED[name].write(folder)
    family = (MODELS | MORE_MODELS)[name]
    processor = (PROCESSORS | MORE_PROCESSORS)[_PROCESSOR_OF.get(name, name)].build()
    tokenizer = processor.tokenizer
    values = family.config().to_dict()
    _fit(values, len(tokenizer))
    for key in list(values):
        stem = key.removesuffix("_id").removesuffix("_index")
        token = getattr(tokenizer, _TOKEN_OF[stem], None) if stem in _TOKEN_OF else None
        if token is not None:
            values[key] = tokenizer.convert_tokens_to_ids(token)
    model_class = getattr(transformers, family.model)
    torch.manual_seed(0)
    model = model_class._from_config(model_class.config_class(**values), dtype=torch.float32)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _fit(values: dict[str, Any], words: int) -> None:
    """The sizes of the processor: its words, its patches."""
    for value in values.values():
        if isinstance(value, dict):
            _fit(value, words)
    if "vocab_size" in values:
        values["vocab_size"] = words + 8 + words % 2  # even: two tensor ranks share it
    if isinstance(values.get("patch_size"), int):
        values["patch_size"] = PATCH_SIZE


def make_sound_rows(folder: Path, count: int = 8) -> Path:
    """Recordings of different lengths with their words; the column is called `audio`."""
    rows = []
    for index in range(count):
        (folder / f"{index}.wav").write_bytes(sound_bytes(tone(0.2 + 0.1 * index, 16000), 16000))
        messages = [
            {"role": "user", "content": "<audio>"},
            {"role": "assistant", "content": "seven " * (1 + index % 3)},
        ]
        rows.append({"messages": messages, "audio": [f"{index}.wav"]})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def make_rows_of(name: str, folder: Path) -> Path:
    """Rows that the family's file can read."""
    if name in RELEASED:
        return rows_of(RELEASED[name], folder)
    return make_sound_rows(folder) if name == "qwen3_asr" else make_rows(folder, count=8)
