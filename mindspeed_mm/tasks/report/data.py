"""What a report shows of a run, read from its folder: metrics, events, environment, configuration, held-out samples."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from mindspeed_mm.core.artifacts import RunFolder, read_jsonl
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.core.redaction import redact, without_secrets
from mindspeed_mm.tasks.report.samples import Round, read_rounds

Record = dict[str, Any]
_OF_SET, _OF_HARNESS = ("benchmark", "title", "tasks"), ("harness", "tasks")
_OF_SAMPLE = {"group", "task", "share"}


@dataclass(frozen=True)
class ReportedRun:
    """One run, as its folder records it."""

    name: str
    path: Path
    steps: list[Record]
    """Logged steps, ascending, each once: what a resumed run did again replaces what it did before."""
    validations: list[Record]
    evaluations: list[Record]
    """Scores of held-out questions while training."""
    events: list[Record]
    facts: Record
    """`run.json`: versions, machine, command, exit status."""
    configuration: str
    """`resolved.yaml`: each value with its origin, secrets taken out."""
    results: Record
    """`eval/results.json`, else those of the last evaluation while training, or empty."""
    samples: list[Record]
    """Evaluated ones."""
    published: list[Record]
    """Results of published sets, of each with its own `samples`."""
    harnesses: list[Record]
    """Figures of harnesses."""
    generated: Record
    """`eval/generated.json`, or empty."""
    rounds: list[Round]
    """What a generator made while it was trained."""
    best: Record
    """`best.json`, or empty."""


def read_run(path: Path) -> ReportedRun:
    """Read a run folder.

    Raises:
        DataError: It is not a run folder, or nothing was logged or evaluated yet.
    """
    folder = RunFolder(path)
    if not folder.metrics.exists() and not folder.run_json.exists():
        raise DataError(
            "is not a run folder: it holds neither metrics.jsonl nor run.json",
            where=str(path),
            way_out="Give the folder that training.save names.",
        )
    metrics = read_jsonl(folder.metrics)
    resolved = ""
    if folder.resolved.exists():
        resolved = folder.resolved.read_text(encoding="utf-8", errors="replace")
    # Results of `mm evaluate` count more than the last ones of the training.
    rounds = sorted(folder.evaluation.glob("while_training/iter_*/results.json"))
    own = folder.evaluation / "results.json"
    evaluation = folder.evaluation
    if rounds and not own.exists():
        evaluation = rounds[-1].parent
    return ReportedRun(
        name=path.resolve().name,
        path=path,
        steps=_latest_by_step(metrics, "loss"),
        validations=_latest_by_step(metrics, "val_loss"),
        evaluations=_latest_by_step(metrics, "eval_*"),
        events=redact(read_jsonl(folder.events)),
        facts=redact(_read_object(folder.run_json)),
        configuration=without_secrets(resolved),
        results=_read_object(evaluation / "results.json"),
        samples=read_jsonl(evaluation / "samples.jsonl"),
        published=_read_published(folder.evaluation),
        harnesses=_with_keys(sorted(folder.evaluation.glob("*/harness.json")), _OF_HARNESS),
        generated=next(iter(_with_keys([folder.evaluation / "generated.json"], ("measures",))), {}),
        rounds=read_rounds(path),
        best=_read_object(folder.best),
    )


def _read_published(evaluation: Path) -> list[Record]:
    """Of the sets that `mm evaluate --benchmark` has scored, each in a folder of its own."""
    found = []
    for path in sorted(evaluation.glob("*/results.json")):
        for results in _with_keys([path], _OF_SET):
            samples = read_jsonl(path.with_name("samples.jsonl"))
            found.append({**results, "samples": [sample for sample in samples if sample.keys() >= _OF_SAMPLE]})
    return found


def _with_keys(paths: Sequence[Path], keys: Collection[str]) -> list[Record]:
    """The objects of files that have these keys; those of other tools, which may have the same names, are left out."""
    found = []
    for path in paths:
        content = _read_object(path)
        if set(keys) <= content.keys():
            found.append(content)
    return found


def choose_samples(samples: Sequence[Record], most_of_each: int) -> tuple[list[Record], list[Record]]:
    """Wrong and right answers to show, at most so many of each, the tasks taking turns."""
    wrong: list[Record] = []
    right: list[Record] = []
    for sample in samples:
        if sample.get("correct"):
            right.append(sample)
        else:
            wrong.append(sample)
    return _tasks_in_turn(wrong)[:most_of_each], _tasks_in_turn(right)[:most_of_each]


def _tasks_in_turn(samples: list[Record]) -> list[Record]:
    by_task: dict[str, list[Record]] = defaultdict(list)
    for sample in samples:
        by_task[str(sample.get("task", ""))].append(sample)
    in_turn = chain.from_iterable(zip_longest(*by_task.values()))  # of a task that has no more it holds None
    return [sample for sample in in_turn if sample is not None]


def _latest_by_step(records: list[Record], key: str) -> list[Record]:
    """Those that have the key, a pattern; of several of one step the last."""
    by_step = {}
    for record in records:
        if isinstance(record.get("step"), int) and fnmatch.filter(record, key):
            by_step[record["step"]] = record
    return [by_step[step] for step in sorted(by_step)]


def _read_object(path: Path) -> Record:
    if not path.exists():
        return {}
    return read_json_object(path, DataError, way_out="Move it away to report without it.")
