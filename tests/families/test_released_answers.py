"""Every family answers by `mm infer`, from a folder in its released keys, what transformers' own `generate` answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.fsdp.models.loading.part import trained_config
from mindspeed_mm.tasks.answer.generation import load_generator
from mindspeed_mm.tasks.answer.questions import read_questions
from tests.helpers.released_layouts import class_of
from tests.helpers.released_rows import ANSWERING, ROWS, write_rows

import transformers  # isort: skip  (after the guard of the lines above)

DEFAULT = ("qwen3vl", "qwen2_5omni")
"""Of the default run; the others are slow ones."""
TOKENS = 5


def plain(folder: Path, inputs: dict[str, Any]) -> list[int]:
    """The tokens behind the prompt."""
    config = trained_config(transformers.AutoConfig.from_pretrained(folder))
    model = class_of(config).from_pretrained(folder, dtype="auto").eval()
    with torch.no_grad():
        made = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    start = 0 if config.is_encoder_decoder else inputs["input_ids"].shape[1]
    return made[0, start:].tolist()


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in ANSWERING]
)
def test_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    folder, rows = row.write(tmp_path / "model"), write_rows(tmp_path / "rows", row.kinds)
    generator = load_generator(folder)
    media = generator.encoder.media(rows.parent)
    questions = list(read_questions(rows, needs_answers=False))
    batches = generator.answer(questions, media, max_new_tokens=TOKENS, batch_size=2)
    answers = [pair for batch in batches for pair in batch]
    assert len(answers) == len(questions)
    for question, answer in answers:
        inputs = generator.encoder.collate([generator.encoder.encode(question.sample, media)])
        expected, given = plain(folder, inputs), list(answer.token_ids)
        assert given and given == expected[: len(given)], (question.id, given, expected)
