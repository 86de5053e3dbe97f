"""Word and character error rates of `mm evaluate`, against the definition, and what is written and shown of them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import mindspeed_mm
from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.fsdp.sampling.answers import scored
from mindspeed_mm.fsdp.sampling.answers.live import Answer
from mindspeed_mm.fsdp.sampling.answers.questions import ask
from mindspeed_mm.fsdp.sampling.answers.scoring import Comparison, ErrorRate, Outcome, bootstrap_interval
from mindspeed_mm.tasks.report import scores
from tests.helpers.runs import mm


def distance(expected: list[str], given: list[str]) -> int:
    """Levenshtein's, by the recurrence."""
    row = list(range(len(given) + 1))
    for i, left in enumerate(expected, start=1):
        before, row = row, [i]
        for j, right in enumerate(given, start=1):
            row.append(min(row[-1] + 1, before[j] + 1, before[j - 1] + (left != right)))
    return row[-1]


@pytest.mark.parametrize("metric", ["wer", "cer"])
def test_an_error_rate_is_the_distance_over_the_length(metric: str) -> None:
    draw = random.Random(0)
    comparison, outcomes, errors, units = Comparison(metric), [], 0, 0  # type: ignore[arg-type]
    for _ in range(60):
        expected, given = (" ".join(draw.choices(["one", "two", "ton", "no"], k=draw.randint(0, 6))) for _ in range(2))
        outcomes.append(comparison.outcome(given, expected))
        parts = (expected.split(), given.split()) if metric == "wer" else (list(expected), list(given))
        assert outcomes[-1] == Outcome(expected == given, distance(*parts), len(parts[0]))
        errors, units = errors + distance(*parts), units + len(parts[0])
    rate = comparison.score(outcomes)
    assert isinstance(rate, ErrorRate)
    assert (rate.errors, rate.units, rate.n, rate.rate) == (errors, units, 60, errors / units)
    assert rate.low < rate.rate < rate.high


@pytest.mark.parametrize(
    ("settings", "errors"),
    [
        ({}, 2),
        ({"ignore_case": True}, 2),
        ({"ignore_punctuation": True}, 1),
        ({"ignore_case": True, "ignore_punctuation": True}, 0),
    ],
)
def test_case_and_punctuation_count_unless_they_are_ignored(settings: dict[str, bool], errors: int) -> None:
    comparison = Comparison("wer", **settings)
    assert comparison.outcome("hello, world don't", "Hello world don’t").errors == errors
    exact = Comparison("exact", **settings)
    assert exact.outcome("hello, world don't", "Hello world don’t").correct is (errors == 0)


@pytest.mark.parametrize(("given", "rate"), [("", 0.0), ("a b", 1.0)])
def test_answers_that_should_be_empty(given: str, rate: float) -> None:
    comparison = Comparison("wer")
    score = comparison.score([comparison.outcome(given, "")])
    assert isinstance(score, ErrorRate)
    assert (score.rate, score.low, score.high) == (rate, rate, rate)


def test_the_interval_covers_the_rate_as_often_as_it_says() -> None:
    """Rows of ten words with one chance in five of an error each: about 95 of 100 intervals hold 0.2."""
    draw = np.random.default_rng(1)
    units = np.full(100, 10)
    held = [
        low <= 0.2 <= high for low, high in (bootstrap_interval(draw.binomial(10, 0.2, 100), units) for _ in range(100))
    ]
    assert 88 <= sum(held) <= 100


def evaluated(comparison: Comparison) -> scored.Evaluation:
    told = [("one two", "one two"), ("one", "one two"), ("three four", "four")]
    answered = [(replace(ask("Say it."), expected=expected), Answer((), given, True)) for given, expected in told]
    facts = {"model": "m", "data": "d", "media_dir": ".", "max_new_tokens": 1, "cut_off": 0, "seconds": 0.0}
    return scored.evaluate_answers(answered, facts, comparison)


def test_what_is_written_is_taken_for_ours_and_shown(tmp_path: Path) -> None:
    evaluation = evaluated(Comparison("wer", ignore_case=True))
    assert evaluation.lines()[0].startswith("word error rate, all: 40.0 % (2 of 5, n=3, 95 % interval ")
    scored.write_evaluation(evaluation, tmp_path)
    scored.check_evaluation_folder(tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["metric"], results["measure"], results["ignore_case"]) == ("wer", "word error rate", True)
    assert results["overall"]["rate"] == 0.4
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(sample["correct"], sample["errors"], sample["units"]) for sample in samples] == [
        (True, 0, 2), (False, 1, 2), (False, 1, 1),
    ]  # fmt: skip
    assert scores.share_of(results["overall"]) == (0.4, "2 of 5 wrong")


def test_an_exact_evaluation_is_taken_for_ours_too(tmp_path: Path) -> None:
    scored.write_evaluation(evaluated(Comparison()), tmp_path)
    scored.check_evaluation_folder(tmp_path)
    scored.write_evaluation(evaluated(Comparison("cer")), tmp_path)
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(UsageError):
        scored.check_evaluation_folder(tmp_path)


@pytest.mark.parametrize("words", [("--metric", "wer"), ("--ignore-case",), ("--ignore-punctuation",)])
def test_nothing_is_compared_with_loss(words: tuple[str, ...]) -> None:
    said = mm("evaluate", "somewhere", "--loss", *words)
    assert said.code == 2
    assert words[0] in said.err and "nothing is generated with --loss" in said.err


def test_python_refuses_the_same() -> None:
    with pytest.raises(UsageError, match="metric"):
        mindspeed_mm.evaluate("somewhere", [], metric="bleu")  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="nothing is generated"):
        mindspeed_mm.evaluate("somewhere", loss=True, metric="wer")
