"""Several runs beside the first: differences of their scores, their answers to the same questions, and what differs in
their configurations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from mindspeed_mm.core.config_path import dotted
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.params.yaml.parser import parse_yaml
from mindspeed_mm.fsdp.params.yaml.tree import plain
from mindspeed_mm.tasks.evaluate.comparing import (
    PairedTest,
    Question,
    by_question,
    compare,
    compare_samples,
    shares_by_group,
)
from mindspeed_mm.tasks.report.data import Record, ReportedRun
from mindspeed_mm.tasks.report.scores import OVERALL

T = TypeVar("T")
MOST_QUESTIONS = 12


def differences(runs: Sequence[ReportedRun]) -> list[Record]:
    """Of each further run to the first, on held-out questions: task, the paired difference with its interval, and the
    test, in words."""
    found = []
    base = by_question(runs[0].samples)
    for series, run in enumerate(runs[1:], 2):
        own = by_question(run.samples)
        shared = [question for question in base if question in own]
        if not shared or runs[0].results.get("measure") != run.results.get("measure"):
            continue
        for task, asked in _by_task(shared, lambda question: question[0]).items():
            ours = [own[question] for question in asked]
            theirs = [base[question] for question in asked]
            test = compare_samples(ours, theirs)
            found.append({"run": run.name, "series": series, "task": task, **_told(test)})
    return found


def published_differences(runs: Sequence[ReportedRun]) -> list[Record]:
    """The same on published sets, of those that both runs were asked whole; a task is named after its set."""
    found = []
    base = {results["benchmark"]: results for results in runs[0].published}
    for series, run in enumerate(runs[1:], 2):
        for results in run.published:
            theirs = base.get(results["benchmark"])
            if theirs is None:
                continue
            for task, test in _on_a_set(results, theirs).items():
                name = f"{results['title']}, {task}"
                found.append({"run": run.name, "series": series, "task": name, **_told(test)})
    return found


def _on_a_set(results: Record, theirs: Record) -> dict[str, PairedTest]:
    """Task → test; nothing where the questions are others."""
    own_shares, base_shares = shares_by_group(results["samples"]), shares_by_group(theirs["samples"])
    if own_shares.keys() != base_shares.keys() or not own_shares:
        return {}
    task_of = {sample["group"]: str(sample["task"]) for sample in results["samples"]}
    is_graded = not {*own_shares.values(), *base_shares.values()} <= {0.0, 1.0}
    tests = {}
    for task, groups in _by_task(list(own_shares), task_of.__getitem__).items():
        ours = {group: own_shares[group] for group in groups}
        of_other = {group: base_shares[group] for group in groups}
        tests[task] = compare(ours, of_other, is_graded=is_graded)
    return tests


def _by_task(questions: Sequence[T], task_of: Callable[[T], str]) -> dict[str, list[T]]:
    """Questions of each task, if there are several, and then all of them."""
    tasks: dict[str, list[T]] = {}
    for question in questions:
        tasks.setdefault(task_of(question), []).append(question)
    parts = tasks if len(tasks) > 1 else {}
    return {**parts, OVERALL: list(questions)}


def _told(test: PairedTest) -> Record:
    points, low, high = test.in_points()
    return {
        "difference": points,
        "interval": f"{low} to {high}",
        "better": test.better,
        "worse": test.worse,
        "questions": test.questions,
        "p_value": "" if test.p_value is None else f"{test.p_value:.2g}",
        "is_clear": test.low > 0 or test.high < 0,
    }


def side_by_side(runs: Sequence[ReportedRun]) -> list[Record]:
    """Questions that all runs were asked, those first on which they differ in being right: each with `sample`, the
    first run's, and of every run `given` and `correct`."""
    answers = [by_question(run.samples) for run in runs]
    agreement: dict[Question, int] = {}
    for question in answers[0]:
        if all(question in own for own in answers):
            agreement[question] = _agreement([own[question] for own in answers])
    chosen = sorted(agreement, key=agreement.__getitem__)
    shown = []
    for question in chosen[:MOST_QUESTIONS]:
        given = []
        for run, own in zip(runs, answers, strict=True):
            sample = own[question]
            given.append({"run": run.name, "given": sample["given"], "correct": bool(sample["correct"])})
        shown.append({"sample": answers[0][question], "answers": given})
    return shown


def _agreement(samples: Sequence[Mapping[str, object]]) -> int:
    """0 where runs differ in being right, 1 where they only say other things, 2 where they say the same."""
    if len({bool(sample["correct"]) for sample in samples}) > 1:
        return 0
    if len({sample["given"] for sample in samples}) > 1:
        return 1
    return 2


def configuration_differences(runs: Sequence[ReportedRun]) -> list[tuple[str, list[str]]]:
    """Keys of the configuration that are not the same in all runs, with the value of each run."""
    settings = [_settings(run.configuration) for run in runs]
    rows = []
    keys = dict.fromkeys(chain.from_iterable(settings))
    for key in keys:
        values = [own.get(key, "–") for own in settings]
        if len(set(values)) > 1:
            rows.append((key, values))
    return rows


def _settings(configuration: str) -> dict[str, str]:
    try:
        loaded = plain(parse_yaml(configuration, "resolved.yaml").root)
    except ConfigError:
        return {}  # a configuration that a person has changed by hand; it is shown below as it is
    if isinstance(loaded, dict):
        return dict(_leaves(loaded, ""))
    return {}


def _leaves(value: object, key: str) -> Iterator[tuple[str, str]]:
    """Dotted keys with their values as text."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, dotted(key, name))
    elif isinstance(value, str):
        yield key, value
    else:
        yield key, json.dumps(value, ensure_ascii=False, default=str)
