"""`mm infer`: how tokens are chosen, thoughts that are left out, and a command that was killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.tasks.answer import infer
from mindspeed_mm.tasks.answer.choosing import Sampling
from mindspeed_mm.tasks.answer.generation import Generator, load_generator
from mindspeed_mm.tasks.answer.live import Answer
from mindspeed_mm.tasks.answer.questions import read_questions
from tests.helpers.runs import mm
from tests.helpers.tiny_models import make_tiny_qwen3

TOKENS = 6
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_qwen3(tmp_path_factory.mktemp("model"))
    path = folder / "generation_config.json"
    said = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**said, "do_sample": True, "temperature": 1.7, "top_k": 40}))
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "questions.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{'one ' * (n % 5)}{n}", "id": f"q{n}"}) + "\n" for n in range(9)))
    return path


def answers(folder: Path, rows: Path, out: Path, **options: Any) -> list[str]:
    infer.run(folder, rows, out, max_new_tokens=TOKENS, **options)
    return [json.loads(line)["answer"] for line in out.read_text().splitlines()]


def test_the_generation_configuration_decides_and_rows_do_not_depend_on_their_batch(
    folder: Path, rows: Path, tmp_path: Path
) -> None:
    found = answers(folder, rows, tmp_path / "all.jsonl", batch_size=9)
    assert answers(folder, rows, tmp_path / "two.jsonl", batch_size=2) == found
    greedy = answers(folder, rows, tmp_path / "greedy.jsonl", sampling=Sampling(temperature=0))
    other = answers(folder, rows, tmp_path / "other.jsonl", sampling=Sampling(seed=1))
    assert len({tuple(each) for each in (found, greedy, other)}) == 3

    generator = load_generator(folder)
    encoder, media = generator.encoder, generator.encoder.media(rows.parent)
    for question, text in zip(read_questions(rows, needs_answers=False), found, strict=True):
        inputs = encoder.collate([encoder.encode(question.sample, media)])
        torch.manual_seed(Sampling(seed=0).of_row(question.row).seed or 0)
        with torch.inference_mode():
            ids = generator.model.generate(**inputs, max_new_tokens=TOKENS)[0, inputs["input_ids"].shape[1] :]
        assert encoder.tokenizer.decode(ids, skip_special_tokens=True).strip() == text


def test_other_settings_are_not_mixed_into_a_file(folder: Path, rows: Path, tmp_path: Path) -> None:
    answers(folder, rows, tmp_path / "a.jsonl")
    with pytest.raises(DataError, match="with other settings"):
        answers(folder, rows, tmp_path / "a.jsonl", sampling=Sampling(temperature=0))


def test_thoughts_are_left_out_where_that_is_asked(
    folder: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thinking = "<think>it is\none</think>\n\none"
    monkeypatch.setattr(Generator, "answer_live", lambda _, rows: [Answer((1,), thinking, True) for _ in rows])
    assert set(answers(folder, rows, tmp_path / "shown.jsonl")) == {thinking}
    assert set(answers(folder, rows, tmp_path / "hidden.jsonl", hides_thoughts=True)) == {"one"}
    monkeypatch.setattr(Generator, "thinks", lambda *_: True)
    monkeypatch.setattr(Generator, "answer_live", lambda _, rows: [Answer((1,), "so</think>two", True) for _ in rows])
    assert set(answers(folder, rows, tmp_path / "begun.jsonl", hides_thoughts=True)) == {"two"}


def test_options(folder: Path, rows: Path, tmp_path: Path) -> None:
    words = ["infer", folder, "--data", rows, "--max-new-tokens", TOKENS]
    for number, options in enumerate(
        (["--beams", 2], ["--temperature", 0.5, "--top-p", 0.5, "--top-k", 3, "--seed", 4])
    ):
        said = mm(*words, "--out", tmp_path / f"{number}.jsonl", *options)
        assert said.code == 0, said.err
    for options, option in (
        (["--temperature", 0, "--top-p", 0.5], "--top-p"),
        (["--beams", 2, "--temperature", 1], "--temperature"),
        (["--temperature", "nan"], "--temperature"),
    ):
        said = mm(*words, "--out", tmp_path / "no.jsonl", *options)
        assert said.code == 2 and option in said.err, said.err


def test_a_command_that_was_killed_goes_on(folder: Path, tmp_path: Path) -> None:
    rows, out = tmp_path / "many.jsonl", tmp_path / "answers.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n} one two", "id": f"q{n}"}) + "\n" for n in range(400)))
    words = ["infer", str(folder), "--data", str(rows), "--out", str(out), "--batch-size", "2", "--max-new-tokens", "6"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "mindspeed_mm", *words], env=environment)
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (out.exists() and out.read_bytes().count(b"\n") >= 6):
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = out.read_text().splitlines()
    assert 6 <= len(kept) < 400
    said = mm(*words, "--json")
    assert said.code == 0, said.err
    outcome = json.loads(said.out)
    assert outcome["answered"] + outcome["kept"] == 400 and outcome["kept"] >= len(kept) - 1
    lines = out.read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [f"q{n}" for n in range(400)]
    assert mm(*words, "--overwrite").code == 0 and out.read_text().splitlines() == lines
