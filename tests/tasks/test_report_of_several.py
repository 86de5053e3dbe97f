"""`mm report RUN RUN`: paired differences as scipy tests them, answers side by side, what differs in configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from mindspeed_mm.fsdp.sampling.answers.scoring import graded
from mindspeed_mm.tasks.evaluate.comparing import compare_rates
from mindspeed_mm.tasks.evaluate.harness.evaluate import Figure, TaskFigures
from mindspeed_mm.tasks.report import report
from mindspeed_mm.tasks.report.comparison import (
    configuration_differences,
    differences,
    published_differences,
    side_by_side,
)
from mindspeed_mm.tasks.report.data import read_run
from mindspeed_mm.tasks.report.scores import score_tables
from tests.tasks.test_report import Page, external, sample, step_record, write_lines


def make_run(folder: Path, right: list[bool], lr: str, **results: Any) -> Path:
    (folder / "eval").mkdir(parents=True)
    write_lines(folder / "metrics.jsonl", [step_record(1), step_record(2), {"step": 2, "eval_accuracy": 0.5}])
    (folder / "resolved.yaml").write_text(f"training:\n  lr: {lr}  # run.yaml:2:3\n  save: {folder}\n  seed: 1\n")
    samples = [sample(number, "ab"[number % 2], is_right) for number, is_right in enumerate(right)]
    write_lines(folder / "eval" / "samples.jsonl", samples)
    (folder / "eval" / "results.json").write_text(json.dumps({"tasks": {}, "measure": "accuracy", **results}))
    return folder


def test_differences_are_those_of_the_paired_test(tmp_path: Path) -> None:
    """Of 40 questions ten went to the second run and three to the first: p = 0.0922852 (statsmodels, scipy)."""
    first = [True] * 13 + [False] * 27
    second = [True] * 10 + [False] * 3 + [True] * 10 + [False] * 17
    runs = [read_run(make_run(tmp_path / "a", first, "0.1")), read_run(make_run(tmp_path / "b", second, "0.2"))]
    *tasks, overall = differences(runs)
    assert [row["task"] for row in tasks] == ["a", "b"]
    assert (overall["difference"], overall["better"], overall["worse"], overall["questions"]) == ("+17.5", 10, 3, 40)
    assert overall["p_value"] == f"{binomtest(10, 13).pvalue:.2g}" == "0.092"
    assert sum(row["better"] for row in tasks) == 10
    shown = side_by_side(runs)
    assert all(len({answer["correct"] for answer in each["answers"]}) == 2 for each in shown)  # where they differ
    assert configuration_differences(runs) == [
        ("training.lr", ["0.1", "0.2"]),
        ("training.save", [str(tmp_path / "a"), str(tmp_path / "b")]),
    ]


def test_rates_are_drawn_in_pairs() -> None:
    draw = np.random.default_rng(3)
    units = draw.integers(1, 20, 300)
    theirs = np.minimum(units, draw.poisson(3, 300))
    ours = np.maximum(theirs - draw.integers(0, 2, 300), 0)
    test = compare_rates(list(zip(ours, units, strict=True)), list(zip(theirs, units, strict=True)))
    assert test.difference == pytest.approx((ours.sum() - theirs.sum()) / units.sum())
    # Another way to the same interval: the spread of a ratio estimator by the delta method.
    residual = (ours - theirs) - test.difference * units
    spread = 1.96 * residual.std(ddof=1) * np.sqrt(300) / units.sum()
    assert test.high - test.low == pytest.approx(2 * spread, rel=0.08)
    assert (test.better, test.worse) == (int((ours < theirs).sum()), 0)


def test_the_page_shows_them_beside_one_another(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / name, right, lr, media_dir=str(tmp_path))
        for name, right, lr in (("one", [True, False] * 8, "0.1"), ("two", [True] * 16, "<b>0.2</b>"))
    ]
    html = report.run(folders, tmp_path / "page.html").read_text()
    page = Page(html)
    parts = ["Difference of accuracy to one", "+50.0", "0.0078", "Answers side by side", "wrong-1"]
    parts += ["What differs in the configurations", "training.lr", "<b>0.2</b>", "Held-out accuracy"]
    assert [part for part in parts if part not in page] == []
    assert "training.seed" not in page.text  # the same in both
    assert "Held-out samples" not in page
    assert external(page, html) == []


def test_runs_without_common_questions_have_no_differences(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / name, [], "0.1")) for name in "ab"]
    assert (differences(runs), side_by_side(runs)) == ([], [])


def add_results(run: Path, shares: list[float], figure: float) -> None:
    """A published set, a harness's figure and measures of generated samples."""
    folder = run / "eval" / "docvqa_val"
    folder.mkdir()
    overall = graded(shares).to_dict()
    results = {"benchmark": "docvqa_val", "title": "DocVQA", "note": "A note.", "tasks": {"all": overall}}
    (folder / "results.json").write_text(json.dumps({**results, "overall": overall}))
    samples = []
    for number, share in enumerate(shares):
        samples.append({"group": str(number), "task": "ab"[number % 2], "share": share, "given": "x"})
    write_lines(folder / "samples.jsonl", samples)
    (run / "eval" / "lmms-eval").mkdir()
    found = TaskFigures({"exact_match": Figure(figure, figure - 0.1, figure + 0.1)}, 12)
    harness = {"harness": {"name": "lmms-eval", "version": "0.7.3"}, "tasks": {"ai2d": found.to_dict()}}
    (run / "eval" / "lmms-eval" / "harness.json").write_text(json.dumps(harness))
    measures = {"SSIM": {"value": figure, "n": 4, "low": 0.25, "high": 0.75}, "PSNR": {"value": None, "n": 4}}
    (run / "eval" / "generated.json").write_text(json.dumps({"measures": measures}))


def test_other_results_stand_beside_one_another(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, [True] * 4, "0.1") for name in ("one", "two")]
    add_results(folders[0], [0.25] * 40, 0.5)
    add_results(folders[1], [0.75] * 40, 0.625)
    runs = [read_run(folder) for folder in folders]
    found = {(row["task"], row["difference"], row["questions"]) for row in published_differences(runs)}
    assert found == {("DocVQA, a", "+50.0", 20), ("DocVQA, b", "+50.0", 20), ("DocVQA, overall", "+50.0", 40)}
    tables = {table.title: table for table in score_tables(runs)}
    assert list(tables) == ["DocVQA", "lmms-eval 0.7.3", "Measures of generated samples"]
    (one, two) = tables["lmms-eval 0.7.3"].lines
    assert (one.task, one.run, one.value, one.interval, one.count) == (
        "ai2d, exact_match", "one", "0.5", "0.4 to 0.6", "n=12",
    )  # fmt: skip
    assert (two.run, two.series, two.value) == ("two", 2, "0.625")
    assert tables["DocVQA"].notes == ["A note."]
    lines = [(line.task, line.run, line.value) for line in tables["Measures of generated samples"].lines]
    assert lines == [
        ("SSIM", "one", "0.5"), ("SSIM", "two", "0.625"), ("PSNR", "one", "infinite"), ("PSNR", "two", "infinite"),
    ]  # fmt: skip
    (folders[0] / "eval" / "other").mkdir()
    for name in ("harness.json", "results.json"):  # of another tool
        (folders[0] / "eval" / "other" / name).write_text('{"tasks": 3}')
    page = Page(report.run(folders, tmp_path / "page.html").read_text())
    for part in ("Difference to one on published sets", "DocVQA, overall", "+50.0", "lmms-eval 0.7.3", "A note."):
        assert part in page
