"""`mm evaluate`: answers held-out questions by generation and scores the answers, per task."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_mm.core.artifacts import make_writable_folder, read_jsonl
from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.fsdp.distributed.job.launch import joined_ranks
from mindspeed_mm.fsdp.sampling.answers.asking import RowsView, check_answers_rows
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.live import Answer
from mindspeed_mm.fsdp.sampling.answers.questions import Question, read_questions, read_transcripts
from mindspeed_mm.fsdp.sampling.answers.scored import (
    SAMPLES,
    Evaluation,
    check_evaluation_folder,
    evaluate_answers,
    write_evaluation,
)
from mindspeed_mm.fsdp.sampling.answers.scoring import Comparison
from mindspeed_mm.tasks.answer.answering import WAIT_S, answer_on_ranks
from mindspeed_mm.tasks.answer.generation import load_on_ranks
from mindspeed_mm.tasks.answer.view import rows_view
from mindspeed_mm.tasks.evaluate.comparing import Question as OfQuestion
from mindspeed_mm.tasks.evaluate.comparing import by_question, compare_samples
from mindspeed_mm.tasks.evaluate.folder import Facts, results_folder
from mindspeed_mm.tasks.evaluate.judge import Judge, Unjudged
from mindspeed_mm.tasks.model_source import ModelSource, resolve_model, with_adapters
from mindspeed_mm.tasks.requests.evaluate import EvaluateRequest


def run(request: EvaluateRequest) -> Evaluation:
    """Score a model on rows with answers, and write `results.json` and `samples.jsonl`.

    As ranks of one job, processes share the rows; or, with `plan`, the model. All of them return the scores.

    Raises:
        MMError: The folder is not a model, rows are bad, `against` holds other questions, or `out` cannot be written.
    """
    data, most = request.data, request.longest_answer
    assert data is not None  # as was checked
    comparison = Comparison(request.metric or "exact", request.ignore_case, request.ignore_punctuation)
    judge = Judge.of(request)
    source = with_adapters(resolve_model(request.folder), request.lora)
    check_answers_rows(source.folder)
    view = rows_view(source, request.config)
    questions = _questions(data, request.media_dir, view)
    others = None
    if request.against is not None:
        # before the model answers, which may take hours
        others = read_others(request.against, questions, comparison)
    media_dir = request.media_dir or data.parent
    out = request.out or results_folder(source.run, source.folder)
    with joined_ranks(WAIT_S) as ranks:
        ranks.first("looking at the results' folder", lambda: _prepare(out, judge))
        began = time.monotonic()

        def answer() -> dict[int, Answer]:
            generator = load_on_ranks(source, view, request.plan, ranks)
            media = generator.encoder.media(media_dir, [data.parent])
            # greedy: scores do not depend on a seed
            greedy, size = Sampling(most, temperature=0), request.questions_at_a_time
            return answer_on_ranks(generator, questions, media, ranks, sampling=greedy, batch_size=size)

        unjudged = Unjudged.of(
            out,
            data,
            (source.fingerprint(), view.mark, most, media_dir.absolute()),
            ((question.row, question.id, question.text) for question in questions),
        )
        answers = answer() if judge is None else unjudged.answers(ranks, answer)
        told = request.data_name or str(data.absolute())
        facts = _facts_of_run(source, told, media_dir, most, time.monotonic() - began, answers)
        verdicts = None
        if judge is not None:
            facts["judge"] = judge.facts()
            verdicts = ranks.first("asking the judge", lambda: judge.verdicts(questions, answers, comparison))
        answered = [(question, answers[question.row]) for question in questions]
        evaluation = evaluate_answers(answered, facts, comparison, verdicts)
        if others is not None:
            evaluation = compared_with(evaluation, others)
        ranks.first("writing the results", lambda: write_evaluation(evaluation, out))
        if verdicts is not None:
            failures = sum(verdict.said is None for verdict in verdicts.values())
            if kept := ranks.first("settling the stored answers", lambda: unjudged.settle(failures)):
                evaluation = replace(evaluation, remarks=(*evaluation.remarks, kept))
    return evaluation


def read_others(against: Path, questions: list[Question], comparison: Comparison) -> dict[OfQuestion, Any]:
    """What another evaluation of the same rows found, by question.

    Raises:
        UsageError: It is of other questions, or compared answers in another way.
    """
    path = against / SAMPLES if against.is_dir() else against
    if not path.is_file():
        way_out = "Name the folder that mm evaluate wrote."
        raise UsageError("holds no results of rows", where=str(against), key="--against", way_out=way_out)
    others = by_question(read_jsonl(path))
    if others.keys() != {(question.task, question.id, question.text) for question in questions}:
        way_out = "Evaluate both models on the same rows."
        raise UsageError("was made with other questions", where=str(path), key="--against", way_out=way_out)
    counts_errors = comparison.metric != "exact"
    for sample in others.values():
        if ("errors" in sample) != counts_errors:
            way_out = "Score both with the same --metric."
            raise UsageError("was scored by another metric", where=str(path), key="--against", way_out=way_out)
    return others


def compared_with(evaluation: Evaluation, others: dict[OfQuestion, Any]) -> Evaluation:
    """An evaluation with a paired test against `read_others`."""
    own = by_question(evaluation.samples)
    test = compare_samples(list(own.values()), [others[question] for question in own])
    remark = f"{evaluation.comparison.title} against the other model: {test}"
    return replace(evaluation, facts=evaluation.facts | {"against": test.to_dict()}, remarks=(remark,))


def _questions(data: Path, media_dir: Path | None, view: RowsView) -> list[Question]:
    """Speech with its transcripts, or rows with their answers."""
    if data.is_dir():
        return read_transcripts(data)
    row_format = view.row_format(data)
    return read_questions(data, needs_answers=True, media_dir=media_dir, row_format=row_format, draws=view.draws)


def _prepare(out: Path, judge: Judge | None) -> None:
    check_evaluation_folder(out)
    make_writable_folder(out)
    if judge is not None:
        judge.check()


def _facts_of_run(
    source: ModelSource,
    data: str,
    media_dir: Path,
    max_new_tokens: int,
    seconds: float,
    answers: dict[int, Answer],
) -> Facts:
    facts: Facts = {"model": str(source.folder.absolute())}
    if source.lora is not None:
        facts["lora"] = str(source.lora.absolute())
    facts |= {
        "data": data,
        "media_dir": str(media_dir.absolute()),
        "max_new_tokens": max_new_tokens,
        "cut_off": sum(not answer.finished for answer in answers.values()),
        "seconds": round(seconds, 3),
    }
    return facts
