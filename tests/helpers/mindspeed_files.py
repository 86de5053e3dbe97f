"""Tiny folders of the models that MindSpeed-MM's files name, made without this package's code, rows for each, and the
paths and sizes of a file that are changed so that it trains on them."""

from __future__ import annotations

import json
from collections.abc import Callable
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

_AS_HERE = ("qwen3tts", "cosyvoice3", "funasr", "moss_tts_delay")
RELEASED = {name: ROWS[name] for name in _AS_HERE} | {
    "step3_vl": ROWS["step3_vl_10b"],
    "mimo_v25": ROWS["mimov2_5"],
    "kimi_k3": ROWS["kimi_k3"],
}
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


_BASIC = "data.dataset_param.basic_parameters"
_ROWS_THEMSELVES = ("qwen3tts", "cosyvoice3", "moss_tts_delay")
"""Their `dataset_dir` is the file of rows."""


def paths_and_sizes(name: str, folder: Path, file: Path) -> list[str]:
    """All that is changed in a file of a family so that it trains two steps in a folder, as `mm train` takes it."""
    model, rows = make_folder(name, folder / "model"), make_rows_of(name, folder)
    changes: dict[str, object] = {
        "model.model_name_or_path": model,
        "data.dataset_param.preprocess_parameters.model_name_or_path": model,
        f"{_BASIC}.dataset": rows,
        f"{_BASIC}.dataset_dir": rows if name in _ROWS_THEMSELVES else folder,
        f"{_BASIC}.cache_dir": folder / "cache",
        f"{_BASIC}.preprocessing_num_workers": 1,
        "data.dataloader_param.num_workers": 0,
        "training.train_iters": 2,
        "training.lr_warmup_ratio": 0,
        "training.load": "null",
        "training.save": folder / "save",
        "training.save_interval": 2,
        **_OF_FAMILY.get(name, lambda *_: {})(model, rows),
    }
    if "val_dataset_param" in file.read_text(encoding="utf-8"):
        changes |= _of_validation(model, rows)
    return [f"{key}={value}" for key, value in changes.items()]


def _of_cosyvoice(model: Path, rows: Path) -> dict[str, object]:
    """Sizes of the tiny folder, and rows by a list, as CosyVoice's recipes have them."""
    listed = rows.parent / "data.list"
    listed.write_text(f"{rows.name}\n", encoding="utf-8")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    width = config["llm_config"]["hidden_size"]
    return {
        f"{_BASIC}.dataset": listed,
        f"{_BASIC}.dataset_dir": listed,
        "model.llm_input_size": width,
        "model.llm_output_size": width,
        "model.speech_token_size": config["speech_token_size"],
        "training.micro_batch_size": 2,
        "training.gradient_accumulation_steps": 1,
        "data.dataset_param.processor.batch.batch_size": 2,
        "data.dataloader_param.prefetch_factor": "null",
    }


def _of_funasr(_model: Path, rows: Path) -> dict[str, object]:
    return {
        "data.train_data_set_list": rows,
        "data.valid_data_set_list": rows,
        "data.dataset_param.dataset_conf.num_workers": 0,
    }


def _of_validation(model: Path, rows: Path) -> dict[str, object]:
    """Of a file that describes its validation rows apart."""
    section = "data.val_dataset_param"
    basic = {"dataset": rows, "dataset_dir": rows.parent, "cache_dir": rows.parent / "cache_val"}
    changes: dict[str, object] = {f"{section}.basic_parameters.{key}": path for key, path in basic.items()}
    return changes | {f"{section}.preprocess_parameters.model_name_or_path": model}


_OF_FAMILY: dict[str, Callable[[Path, Path], dict[str, object]]] = {
    "cosyvoice3": _of_cosyvoice,
    "funasr": _of_funasr,
}
