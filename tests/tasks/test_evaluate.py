"""`mm evaluate`: exact match, Wilson's interval, and the files that it leaves."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image
from scipy.stats import binomtest

from mindspeed_mm.cli.evaluate import command
from mindspeed_mm.core.errors import DataError, ModelFolderError
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.questions import read_questions
from mindspeed_mm.fsdp.sampling.answers.scoring import Comparison, score, wilson_interval
from mindspeed_mm.tasks.answer.generation import load_generator
from mindspeed_mm.tasks.evaluate import evaluate
from mindspeed_mm.tasks.requests.evaluate import EvaluateRequest
from tests.helpers.runs import mm
from tests.helpers.tiny_models import make_tiny_qwen3_vl

TOKENS = 4


@pytest.mark.parametrize(("correct", "n"), [(0, 1), (1, 1), (0, 20), (20, 20), (9, 10), (351, 359), (1, 10_000)])
def test_wilson_interval_is_scipys(correct: int, n: int) -> None:
    expected = binomtest(correct, n).proportion_ci(method="wilson")
    assert wilson_interval(correct, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_wilson_interval_by_hand() -> None:
    """9 of 10: (0.9 + 0.19207 ± 1.96 √(0.009 + 0.0096036)) / 1.38415."""
    assert wilson_interval(9, 10) == pytest.approx((0.5958, 0.9821), abs=5e-5)
    with pytest.raises(ValueError, match="no trials"):
        score([])


def test_a_score_in_words() -> None:
    assert str(score([True] * 351 + [False] * 8)) == "97.8 % (n=359, 95 % interval 95.7–98.9 %)"


@pytest.mark.parametrize(
    ("given", "expected", "match"),
    [("seven", "seven", True), (" 3  1\n4", "3 1 4", True), ("Seven", "seven", False), ("31 4", "3 1 4", False),
     ("e\u0301", "\u00e9", True), ("seven.", "seven", False), ("", "seven", False)],
)  # fmt: skip
def test_exact_match(given: str, expected: str, match: bool) -> None:
    assert Comparison().outcome(given, expected).correct is match


def test_what_only_draws_is_refused_with_how_it_is_measured(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    (tmp_path / "rows.jsonl").write_text('{"path": "a.png", "cap": "a"}\n')
    with pytest.raises(ModelFolderError, match=r"it draws, and answers no questions.*mm evaluate samples --generated"):
        evaluate.run(EvaluateRequest(str(tmp_path), data=tmp_path / "rows.jsonl"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_vl(tmp_path_factory.mktemp("model"), tie=False, initializer_range=0.4)


@pytest.fixture
def rows(tmp_path: Path, folder: Path) -> Path:
    """Twelve rows of two tasks; the expected answer is what the model says, but for rows 2, 5 and 8."""
    path = tmp_path / "test.jsonl"

    def write(answers: list[str]) -> None:
        lines = []
        for number, answer in enumerate(answers):
            Image.new("RGB", (16, 16), (20 * number, 9, 9)).save(tmp_path / f"{number}.png")
            turns = [{"from": "human", "value": f"<image>what is {number}?"}, {"from": "gpt", "value": answer}]
            row = {"id": f"r{number}", "task": f"task-{number % 2}", "image": f"{number}.png", "conversations": turns}
            lines.append(json.dumps(row) + "\n")
        path.write_text("".join(lines))

    write(["?"] * 12)
    generator = load_generator(folder)
    questions = read_questions(path, needs_answers=True)
    batches = generator.answer(
        questions, MediaLoader(tmp_path), sampling=Sampling(TOKENS, temperature=0), batch_size=12
    )
    said = {question.row: answer.text for batch in batches for question, answer in batch}
    write([("no: " if number in (2, 5, 8) else "") + said[number + 1] for number in range(12)])
    return path


def test_scores_and_files(folder: Path, rows: Path, tmp_path: Path) -> None:
    arguments = [str(folder), "--data", str(rows), "--out", str(tmp_path / "eval"), "--max-new-tokens", str(TOKENS)]
    result = CliRunner().invoke(command, [*arguments, "--batch-size", "5"], catch_exceptions=False)
    assert result.stdout.splitlines()[-3:] == [
        "accuracy, task-0: 66.7 % (n=6, 95 % interval 30.0–90.3 %)",
        "accuracy, task-1: 83.3 % (n=6, 95 % interval 43.6–97.0 %)",
        "accuracy, overall: 75.0 % (n=12, 95 % interval 46.8–91.1 %)",
    ]
    results = json.loads((tmp_path / "eval" / "results.json").read_text())
    assert {name: (task["correct"], task["n"]) for name, task in results["tasks"].items()} == {
        "task-0": (4, 6),
        "task-1": (5, 6),
    }
    assert results["overall"]["accuracy"] == 9 / 12
    samples = [json.loads(line) for line in (tmp_path / "eval" / "samples.jsonl").read_text().splitlines()]
    assert [sample["id"] for sample in samples] == [f"r{number}" for number in range(12)]
    assert [sample["id"] for sample in samples if not sample["correct"]] == ["r2", "r5", "r8"]
    assert samples[2] == {
        "id": "r2",
        "task": "task-0",
        "image": "2.png",
        "question": "what is 2?",
        "expected": "no: " + samples[2]["given"],
        "given": samples[2]["given"],
        "correct": False,
    }


def test_another_models_answers_to_the_same_rows(folder: Path, rows: Path, tmp_path: Path) -> None:
    """Of the other's three wrong answers two are right now, and one of its right ones is wrong."""
    evaluate.run(EvaluateRequest(str(folder), data=rows, out=tmp_path / "first", max_new_tokens=TOKENS))
    path = tmp_path / "first" / "samples.jsonl"
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    for sample, is_right in ((samples[0], False), (samples[1], False), (samples[2], True)):
        sample["correct"] = is_right
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    arguments = ["--data", str(rows), "--out", str(tmp_path / "eval"), "--max-new-tokens", str(TOKENS)]
    told = CliRunner().invoke(command, [str(folder), *arguments, "--against", str(path.parent)], catch_exceptions=False)
    last = told.stdout.splitlines()[-1]
    assert last.startswith("accuracy against the other model: +8.3 points (95 % interval ")
    assert last.endswith("better on 2, worse on 1 of 12 questions, p = 1 by McNemar's exact test")
    assert json.loads((tmp_path / "eval" / "results.json").read_text())["against"]["p_value"] == 1
    for words, message in (
        (["--metric", "wer"], "was scored by another metric"),
        (["--against", str(tmp_path)], "holds no results of rows"),
    ):
        said = mm("evaluate", folder, *arguments, "--against", path.parent, *words)
        assert said.code == 2 and message in said.err, said.err
    path.write_text(path.read_text().replace("what is 2?", "what was 2?"))
    said = mm("evaluate", folder, *arguments, "--against", path)
    assert said.code == 2 and "was made with other questions" in said.err


def test_results_of_one_folder_do_not_replace_those_of_another(
    folder: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    for model in (folder, other):
        evaluate.run(EvaluateRequest(str(model), data=rows, max_new_tokens=2))
        assert json.loads(Path("eval", model.name, "results.json").read_text())["model"] == str(model)


def test_json_is_what_is_written(folder: Path, rows: Path, tmp_path: Path) -> None:
    arguments = [str(folder), "--data", str(rows), "--out", str(tmp_path / "eval"), "--max-new-tokens", "2", "--json"]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert json.loads(result.stdout) == json.loads((tmp_path / "eval" / "results.json").read_text())


def test_a_row_without_an_answer_is_named(folder: Path, rows: Path, tmp_path: Path) -> None:
    with rows.open("a") as file:
        file.write('{"conversations": [{"from": "human", "value": "and this?"}]}\n')
    with pytest.raises(DataError, match=re.escape("test.jsonl:13")):
        evaluate.run(EvaluateRequest(str(folder), data=rows, out=tmp_path / "eval"))
    assert not (tmp_path / "eval").exists()


def test_nothing_right_is_a_score_from_exactly_0() -> None:
    for n in range(1, 200):
        assert score([False] * n).low == 0.0 and score([True] * n).high == 1.0


@pytest.mark.parametrize("words", [[], ["--loss"]])
def test_rows_of_other_columns_lead_to_a_yaml_that_names_them(folder: Path, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "own.jsonl").write_text('{"ask": "Say red.", "reply": "red"}\n')
    said = CliRunner().invoke(command, [str(folder), "--data", str(tmp_path / "own.jsonl"), *words])
    assert isinstance(said.exception, DataError)
    assert "data.dataset_param.attr" in str(said.exception) and "--config YAML" in str(said.exception)
