"""Every family's rows, as training shows them to the model, are what the processor of the released folder makes of the
same conversation: tokens, and tensors of media."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from PIL import Image

from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from tests.helpers.released_rows import ANSWERING, ROWS, write_rows
from tests.tasks.test_same_view import difference

DEFAULT = ("qwen3omni", "kimi_vl")
"""Of the default run; the others are slow ones."""


ENDS = {"glm4v": "<|user|>", "glm4v_moe": "<|user|>"}
"""Of families whose templates write no end behind the model's last turn: what ends it."""


def by_processor(
    name: str, processor: Any, row: dict[str, Any], folder: Path, processing: dict[str, Any]
) -> dict[str, Any]:
    """By nothing but transformers."""
    images = [Image.open(folder / name).convert("RGB") for name in row.get("images", ())]
    sounds = [soundfile.read(folder / name, dtype="float32") for name in row.get("audios", ())]
    question, answer = row["messages"]
    text = question["content"].replace("<image>", "").replace("<audio>", "")
    if not hasattr(processor, "tokenizer"):
        chat = [question, answer]
        return dict(processor.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt"))
    template = processor.chat_template or processor.tokenizer.chat_template
    if template is None:  # Whisper: the sound stands nowhere in the text
        ids = processor.tokenizer(answer["content"], return_tensors="pt")["input_ids"]
        ((samples, rate),) = sounds
        return {"input_ids": ids} | dict(processor(audio=samples, sampling_rate=rate, return_tensors="pt"))
    media = [{"type": kind} for kind in ("image", "audio") if row.get(f"{kind}s")]
    turns = [{"role": "user", "content": [*media, {"type": "text", "text": text}]}]
    turns.append({"role": "assistant", "content": [{"type": "text", "text": answer["content"]}]})
    rendered = processor.apply_chat_template(turns, chat_template=template, tokenize=False)
    given: dict[str, Any] = {"images": images} if images else {}
    if sounds:
        given |= {"audio": [samples for samples, _ in sounds], "sampling_rate": sounds[0][1]}
    bos = processor.tokenizer.bos_token
    options = {"add_special_tokens": not (bos and rendered.startswith(bos))}
    if end := ENDS.get(name):
        rendered = rendered.rstrip() + end
    return dict(processor(text=[rendered], return_tensors="pt", text_kwargs=options, **given, **processing))


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in ANSWERING]
)
def test_rows_are_what_the_processor_makes_of_them(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    folder, path = row.write(tmp_path / "model"), write_rows(tmp_path / "rows", row.kinds, rate=row.rate)
    param = DatasetParam.model_validate(
        {
            "basic_parameters": {"dataset": str(path), "dataset_dir": str(path.parent), "cutoff_len": 4096},
            "preprocess_parameters": {"model_name_or_path": str(folder)},
        }
    )
    dataset = build_mm_dataset(param)[0]
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        encoded = dataset[number]
        shown = {"input_ids": torch.tensor(encoded["input_ids"])[None]} | dataset.plugin.collate(encoded["media"])
        made = by_processor(name, dataset.processor, json.loads(line), path.parent, row.processing)
        assert difference(shown, made) == [], number
