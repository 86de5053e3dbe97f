"""Answers to questions whose answers are known, scored by task, and the two files that an evaluation writes."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from mindspeed_mm.core.artifacts import atomic_write_text
from mindspeed_mm.core.file_writing import IsOurs, any_of, check_output_file, first_line_has, is_object_of
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.fsdp.sampling.answers.live import Answer
from mindspeed_mm.fsdp.sampling.answers.questions import Question
from mindspeed_mm.fsdp.sampling.answers.scoring import Comparison, ErrorRate, Outcome, Score
from mindspeed_mm.fsdp.sampling.answers.spoken import words_of

RESULTS = "results.json"
SAMPLES = "samples.jsonl"
EXACT = Comparison()
_SAMPLE_KEYS = ("id", "task", "image", "question", "expected", "given", "correct")
_KEYS = ("tasks", "overall", "model", "data", "media_dir", "max_new_tokens", "cut_off", "seconds")
_OPTIONAL = ("step", "lora", "judge", "recogniser", "against", "measure", "metric", "ignore_case", "ignore_punctuation")
_is_samples = any_of(
    first_line_has(*_SAMPLE_KEYS),
    first_line_has(*_SAMPLE_KEYS, "errors", "units"),
    first_line_has(*_SAMPLE_KEYS, "judge"),
)


def _is_results_of(kind: type[Score | ErrorRate]) -> IsOurs:
    return is_object_of(_KEYS, _OPTIONAL, "overall", [field.name for field in fields(kind)])


_is_results = any_of(_is_results_of(Score), _is_results_of(ErrorRate))


@dataclass(frozen=True)
class Verdict:
    """What a judge found of an answer that is not the expected one."""

    correct: bool
    """Whether it means the same; False where the judge failed."""
    said: str | None = None
    """In the judge's own words."""
    failure: str | None = None
    """Why there is none."""


@dataclass(frozen=True)
class Evaluation:
    """Scores by task, in the order of first appearance, and over all questions."""

    tasks: Mapping[str, Score | ErrorRate]
    overall: Score | ErrorRate
    facts: JsonObject
    samples: list[JsonObject]
    comparison: Comparison = EXACT
    remarks: Sequence[str] = ()
    """Lines for people behind the scores."""

    @property
    def scores(self) -> dict[str, Score | ErrorRate]:
        """Task → score, and `overall`."""
        return {**self.tasks, "overall": self.overall}

    def to_dict(self) -> JsonObject:
        """Return what `results.json` holds: scores by task and overall, facts, and the comparison."""
        tasks = {name: score.to_dict() for name, score in self.tasks.items()}
        return {"tasks": tasks, "overall": self.overall.to_dict(), **self.facts, **self.comparison.to_dict()}

    def lines(self) -> list[str]:
        """For people: how many answers were not whole, if any, and the score of each task and of all."""
        told: list[str] = []
        if cut_off := self.facts.get("cut_off"):
            limit = self.facts["max_new_tokens"]
            told.append(f"{cut_off} answers were cut off at {limit} tokens (--max-new-tokens)")
        shown = self.scores if len(self.tasks) > 1 else self.tasks
        for name, score in shown.items():
            told.append(f"{self.comparison.title}, {name}: {score}")
        failed = list(filter(_judges_failure, self.samples))
        if failed:
            told.append(
                f"{len(failed)} answers count as wrong because the judge failed; the first is that of "
                f"{failed[0]['id']}: {_judges_failure(failed[0])}"
            )
        return [*told, *self.remarks]


def _judges_failure(sample: JsonMapping) -> str | None:
    """Why there is no verdict on an answer that a judge was asked about."""
    verdict = sample.get("judge")
    if verdict:
        return verdict["failure"]
    return None


def evaluate_answers(
    answered: list[tuple[Question, Answer]],
    facts: JsonObject,
    comparison: Comparison = EXACT,
    verdicts: Mapping[int, Verdict] | None = None,
) -> Evaluation:
    """Compare each answer with the expected one; thoughts are no part of either.

    Args:
        answered: Questions with their answers.
        facts: What the results say beside the scores.
        comparison: How answers are compared.
        verdicts: By row, where a judge was asked: its word counts for them.
    """
    by_task: dict[str, list[Outcome]] = defaultdict(list)
    outcomes: list[Outcome] = []
    samples = []
    for question, answer in answered:
        outcome = comparison.outcome(words_of(answer.text), words_of(question.expected or ""))
        sample = _scored_sample(question, answer, outcome, comparison)
        if verdicts is not None:
            sample["judge"] = None
            if verdict := verdicts.get(question.row):
                outcome = Outcome(verdict.correct)
                sample |= {"correct": outcome.correct, "judge": asdict(verdict)}
        by_task[question.task].append(outcome)
        outcomes.append(outcome)
        samples.append(sample)
    tasks = {name: comparison.score(of_task) for name, of_task in by_task.items()}
    return Evaluation(tasks, comparison.score(outcomes), facts, samples, comparison)


def check_evaluation_folder(out: Path) -> None:
    """Raise `UsageError` when a folder holds files of these names that no evaluation wrote."""
    check_output_file(out / SAMPLES, _is_samples, "--out")
    check_output_file(out / RESULTS, _is_results, "--out")


def write_evaluation(evaluation: Evaluation, out: Path) -> None:
    """Write the samples, then the results: where results stand, the samples are theirs."""
    (out / RESULTS).unlink(missing_ok=True)
    lines = [json.dumps(sample, ensure_ascii=False) + "\n" for sample in evaluation.samples]
    atomic_write_text(out / SAMPLES, "".join(lines))
    atomic_write_text(out / RESULTS, json.dumps(evaluation.to_dict(), indent=2, ensure_ascii=False) + "\n")


def _scored_sample(question: Question, answer: Answer, outcome: Outcome, comparison: Comparison) -> JsonObject:
    names = question.image_names
    sample: JsonObject = {
        "id": question.id,
        "task": question.task,
        "image": names[0] if len(names) == 1 else names,
        "question": question.text,
        "expected": question.expected,
        "given": answer.text,
        "correct": outcome.correct,
    }
    if comparison.metric != "exact":
        sample |= {"errors": outcome.errors, "units": outcome.units}
    return sample
