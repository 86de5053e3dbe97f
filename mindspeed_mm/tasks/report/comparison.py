"""Several runs beside the first: differences of their scores, their answers to the same questions, and what differs in
their configurations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from mindspeed_mm.tasks.evaluate.published.comparing import PairedTest, compare, compare_rates
from mindspeed_mm.tasks.report.data import Record, ReportedRun

MOST_QUESTIONS = 12
_OVERALL = "overall"
_SAMPLE = ("id", "task", "question", "expected", "given", "correct")
_Question = tuple[str, str, str]


def differences(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """Of each further run to the first: task, the paired difference with its interval, and the test, in words."""
    found = []
    base = _by_question(runs[0].samples)
    for place, run in enumerate(runs[1:], 2):
        own = _by_question(run.samples)
        shared = [question for question in base if question in own]
        if not shared or runs[0].results.get("measure") != run.results.get("measure"):
            continue
        tasks = list(dict.fromkeys(question[0] for question in shared))
        for task in [*(tasks if len(tasks) > 1 else []), _OVERALL]:
            asked = [question for question in shared if task in (_OVERALL, question[0])]
            test = _compared([own[question] for question in asked], [base[question] for question in asked])
            found.append({"run": run.name, "series": place, "task": task, **_told(test)})
    return found


def _compared(ours: Sequence[Record], theirs: Sequence[Record]) -> PairedTest:
    if all("errors" in sample for sample in (*ours, *theirs)):
        pairs = ([(sample["errors"], sample["units"]) for sample in samples] for samples in (ours, theirs))
        return compare_rates(*pairs)
    right = ({str(n): float(bool(sample["correct"])) for n, sample in enumerate(samples)} for samples in (ours, theirs))
    return compare(*right, is_graded=False)


def _told(test: PairedTest) -> dict[str, Any]:
    points, low, high = (f"{100 * value:+.1f}" for value in (test.difference, test.low, test.high))
    return {
        "difference": points,
        "interval": f"{low} to {high}",
        "better": test.better,
        "worse": test.worse,
        "questions": test.questions,
        "p_value": "" if test.p_value is None else f"{test.p_value:.2g}",
        "is_clear": test.low > 0 or test.high < 0,
    }


def side_by_side(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """Questions that all runs were asked, those first on which they differ in being right: each with `sample`, the
    first run's, and of every run `given` and `correct`."""
    answers = [_by_question(run.samples) for run in runs]
    shared = [question for question in answers[0] if all(question in own for own in answers[1:])]

    def agreement(question: _Question) -> int:
        given = [own[question] for own in answers]
        if len({bool(sample["correct"]) for sample in given}) > 1:
            return 0
        return 1 if len({sample["given"] for sample in given}) > 1 else 2

    chosen = sorted(shared, key=agreement)[:MOST_QUESTIONS]
    return [
        {
            "sample": answers[0][question],
            "answers": [
                {"run": run.name, "given": own[question]["given"], "correct": bool(own[question]["correct"])}
                for run, own in zip(runs, answers, strict=True)
            ],
        }
        for question in chosen
    ]


def configuration_differences(runs: Sequence[ReportedRun]) -> list[tuple[str, list[str]]]:
    """Keys of the configuration that are not the same in all runs, with the value of each run."""
    settings = [_settings(run.configuration) for run in runs]
    keys = dict.fromkeys(key for own in settings for key in own)
    rows = [(key, [own.get(key, "–") for own in settings]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _settings(configuration: str) -> dict[str, str]:
    try:
        loaded = YAML(typ="safe", pure=True).load(configuration)
    except (YAMLError, RecursionError, ValueError):
        return {}  # a configuration that a person has changed by hand; it is shown below as it is
    return dict(_leaves(loaded, "")) if isinstance(loaded, dict) else {}


def _leaves(value: Any, key: str) -> list[tuple[str, str]]:
    if isinstance(value, dict) and value:
        return [leaf for name, inner in value.items() for leaf in _leaves(inner, f"{key}.{name}" if key else str(name))]
    return [(key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))]


def _by_question(samples: Sequence[Record]) -> dict[_Question, Record]:
    """Samples of `mm evaluate` by task, id and question; those of other tools are left out."""
    return {
        (str(sample["task"]), str(sample["id"]), str(sample["question"])): sample
        for sample in samples
        if all(name in sample for name in _SAMPLE)
    }
