"""`mm report RUN RUN`: paired differences as scipy tests them, answers side by side, what differs in configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from mindspeed_mm.tasks.evaluate.published.comparing import compare_rates
from mindspeed_mm.tasks.report import report
from mindspeed_mm.tasks.report.comparison import configuration_differences, differences, side_by_side
from mindspeed_mm.tasks.report.data import read_run
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
