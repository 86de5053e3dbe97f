"""`mm evaluate`: answers held-out questions by generation and scores the answers, per task."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mindspeed_mm.core.artifacts import atomic_write_text, make_writable_folder
from mindspeed_mm.core.file_writing import any_of, check_output_file, first_line_has, is_object_of
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.live import Answer
from mindspeed_mm.fsdp.sampling.answers.questions import Question, read_questions
from mindspeed_mm.fsdp.sampling.answers.scoring import Comparison, ErrorRate, Outcome, Score
from mindspeed_mm.fsdp.sampling.answers.spoken import words_of
from mindspeed_mm.tasks.answer.answering import answer_all
from mindspeed_mm.tasks.answer.generation import load_generator
from mindspeed_mm.tasks.answer.view import rows_view
from mindspeed_mm.tasks.model_source import ModelSource, resolve_model, with_adapters

RESULTS = "results.json"
SAMPLES = "samples.jsonl"
EXACT = Comparison()
_SAMPLE_KEYS = ("id", "task", "image", "question", "expected", "given", "correct")
_KEYS = ("tasks", "overall", "model", "data", "media_dir", "max_new_tokens", "cut_off", "seconds")
_OPTIONAL = ("lora", "measure", "metric", "ignore_case", "ignore_punctuation")
_is_samples = any_of(first_line_has(*_SAMPLE_KEYS), first_line_has(*_SAMPLE_KEYS, "errors", "units"))
_is_results = any_of(
    *(is_object_of(_KEYS, _OPTIONAL, "overall", [field.name for field in fields(of)]) for of in (Score, ErrorRate))
)


@dataclass(frozen=True)
class Evaluation:
    """Scores by task, in the order of first appearance, and over all questions."""

    tasks: dict[str, Score | ErrorRate]
    overall: Score | ErrorRate
    facts: dict[str, Any]
    samples: list[dict[str, Any]]
    comparison: Comparison = EXACT

    @property
    def scores(self) -> dict[str, Score | ErrorRate]:
        """Task → score, and `overall`."""
        return {**self.tasks, "overall": self.overall}

    def to_dict(self) -> dict[str, Any]:
        """What `results.json` holds."""
        tasks = {name: score.to_dict() for name, score in self.tasks.items()}
        return {"tasks": tasks, "overall": self.overall.to_dict(), **self.facts, **self.comparison.to_dict()}

    def lines(self) -> list[str]:
        """The score of each task, for people."""
        return [f"{self.comparison.title}, {name}: {score}" for name, score in self.tasks.items()]


def run(
    model: Path,
    data: Path,
    *,
    out: Path | None = None,
    batch_size: int = 64,
    max_new_tokens: int = 512,
    media_dir: Path | None = None,
    lora: Path | None = None,
    config: Path | None = None,
    data_name: str | None = None,
    comparison: Comparison = EXACT,
) -> Evaluation:
    """Score a model on rows with answers, and write `results.json` and `samples.jsonl`.

    Args:
        model: A Hugging Face folder or a run.
        data: Rows as `read_questions` takes them, each with the model's answer.
        out: Where the two files go; by default `eval/` inside a run, `eval/` in the working directory otherwise.
        batch_size: Questions answered at a time.
        max_new_tokens: Most tokens of an answer.
        media_dir: Where relative media paths start; by default the folder of `data`.
        lora: Adapters to put beside the weights; None: the run's `inference.adapter`.
        config: Says how rows are laid out and shown, instead of the run's own.
        data_name: What the results call `data`; None: its path.
        comparison: How answers are compared with the expected ones.

    Raises:
        MMError: The folder is not a model, rows are bad, or `out` cannot be written.
    """
    source = with_adapters(resolve_model(model), lora)
    view = rows_view(source, config)
    questions = read_questions(data, needs_answers=True, media_dir=media_dir, row_format=view.row_format(data))
    media_dir = media_dir or data.parent
    out = out or (source.run or Path.cwd()) / "eval"
    check_evaluation_folder(out)
    make_writable_folder(out)
    began = time.monotonic()
    generator = load_generator(source.folder, source.lora, view)
    media = generator.encoder.media(media_dir, [data.parent])
    greedy = Sampling(max_new_tokens, temperature=0)
    batches = answer_all(generator, questions, media, sampling=greedy, batch_size=batch_size)
    answers = {question.row: answer for batch in batches for question, answer in batch}
    told = data_name or str(data.absolute())
    facts = _facts(source, told, media_dir, max_new_tokens, time.monotonic() - began, answers)
    evaluation = evaluate_answers([(question, answers[question.row]) for question in questions], facts, comparison)
    write_evaluation(evaluation, out)
    return evaluation


def evaluate_answers(
    answered: list[tuple[Question, Answer]], facts: dict[str, Any], comparison: Comparison = EXACT
) -> Evaluation:
    """Compare each answer with the expected one; thoughts are no part of either."""
    by_task: dict[str, list[Outcome]] = defaultdict(list)
    samples = []
    for question, answer in answered:
        outcome = comparison.outcome(words_of(answer.text), words_of(question.expected or ""))
        by_task[question.task].append(outcome)
        samples.append(_sample(question, answer, outcome, comparison))
    tasks = {name: comparison.score(outcomes) for name, outcomes in by_task.items()}
    overall = comparison.score([outcome for outcomes in by_task.values() for outcome in outcomes])
    return Evaluation(tasks, overall, facts, samples, comparison)


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


def _sample(question: Question, answer: Answer, outcome: Outcome, comparison: Comparison) -> dict[str, Any]:
    names = question.image_names
    return {
        "id": question.id,
        "task": question.task,
        "image": names[0] if len(names) == 1 else names,
        "question": question.text,
        "expected": question.expected,
        "given": answer.text,
        "correct": outcome.correct,
        **({} if comparison.metric == "exact" else {"errors": outcome.errors, "units": outcome.units}),
    }


def _facts(
    source: ModelSource,
    data: str,
    media_dir: Path,
    max_new_tokens: int,
    seconds: float,
    answers: dict[int, Answer],
) -> dict[str, Any]:
    return {
        "model": str(source.folder.absolute()),
        **({"lora": str(source.lora.absolute())} if source.lora is not None else {}),
        "data": data,
        "media_dir": str(media_dir.absolute()),
        "max_new_tokens": max_new_tokens,
        "cut_off": sum(not answer.finished for answer in answers.values()),
        "seconds": round(seconds, 3),
    }
