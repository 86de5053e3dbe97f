"""Every family answers by `mm infer`, from a folder in its released keys, what transformers' own `generate` answers;
`mm evaluate` counts these answers as a hand does."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.fsdp.models.loading.folder import trained_config
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.questions import read_questions
from mindspeed_mm.tasks.answer.generation import load_generator
from tests.helpers.released_layouts import class_of
from tests.helpers.released_rows import ANSWERING, ROWS, write_rows
from tests.helpers.runs import mm

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


every_family = pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in ANSWERING]
)


@every_family
def test_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    folder, rows = row.write(tmp_path / "model"), write_rows(tmp_path / "rows", row.kinds)
    generator = load_generator(folder)
    media = generator.encoder.media(rows.parent)
    questions = list(read_questions(rows, needs_answers=False))
    batches = generator.answer(questions, media, sampling=Sampling(TOKENS, temperature=0), batch_size=2)
    answers = [pair for batch in batches for pair in batch]
    assert len(answers) == len(questions)
    for question, answer in answers:
        inputs = generator.encoder.collate([generator.encoder.encode(question.sample, media)])
        expected, given = plain(folder, inputs), list(answer.token_ids)
        assert given and given == expected[: len(given)], (question.id, given, expected)


def edits(given: str, expected: str) -> int:
    """Characters to insert, to take out or to exchange (Levenshtein 1966), row by row of the table."""
    last = list(range(len(expected) + 1))
    for number, character in enumerate(given, start=1):
        row = [number]
        for place, other in enumerate(expected, start=1):
            row.append(min(last[place] + 1, row[-1] + 1, last[place - 1] + (character != other)))
        last = row
    return last[-1]


@every_family
def test_evaluate_counts_as_a_hand_does(name: str, tmp_path: Path) -> None:
    """Every other expected answer is what transformers says; of the others the wrong characters count."""
    row = ROWS[name]
    folder, rows = row.write(tmp_path / "model"), write_rows(tmp_path / "rows", row.kinds)
    generator = load_generator(folder)
    media = generator.encoder.media(rows.parent)
    said, written = [], []
    for number, question in enumerate(read_questions(rows, needs_answers=True)):
        inputs = generator.encoder.collate([generator.encoder.encode(question.sample, media)])
        ids, end = plain(folder, inputs), generator.tokenizer.eos_token_id
        # A folder whose generation settings name no end is ended by its tokenizer's.
        text = generator.tokenizer.decode(ids[: ids.index(end)] if end in ids else ids, skip_special_tokens=True)
        said.append(" ".join(unicodedata.normalize("NFC", text).split()))
        line = json.loads(rows.read_text(encoding="utf-8").splitlines()[number])
        if number % 2 and said[-1]:
            line["messages"][1]["content"] = said[-1]
        written.append(line)
    rows.write_text("".join(json.dumps(line) + "\n" for line in written), encoding="utf-8")

    told = mm("evaluate", folder, "--data", rows, "--out", tmp_path / "scores", "--json", "--metric", "cer",
              "--max-new-tokens", TOKENS)  # fmt: skip
    assert told.code == 0, told.err
    counted = json.loads(told.out)["overall"]
    expected = [line["messages"][1]["content"] for line in written]
    assert counted["n"] == len(said) == 4
    assert counted["units"] == sum(map(len, expected))
    assert counted["errors"] == sum(map(edits, said, expected)) > 0
