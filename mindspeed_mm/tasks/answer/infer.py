"""`mm infer`: one answer to a picture and a prompt, or a file of answers to a file of questions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import DataError, UsageError
from mindspeed_mm.core.file_writing import check_output_file, check_output_place, first_line_has
from mindspeed_mm.core.folder_writing import resolve_output
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem
from mindspeed_mm.fsdp.distributed.job.launch import joined_ranks
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.fsdp.sampling.answers.live import Answer
from mindspeed_mm.fsdp.sampling.answers.questions import Question, ask, read_questions
from mindspeed_mm.tasks.answer.answering import WAIT_S, AnswerFile, answer_all
from mindspeed_mm.tasks.answer.generation import load_generator, load_on_ranks
from mindspeed_mm.tasks.answer.view import rows_view
from mindspeed_mm.tasks.model_source import ModelSource, resolve_model, with_adapters

is_answers = first_line_has("row", "id", "question", "images", "answer", "finished", "model")
"""Whether a file begins like one that this command wrote."""


@dataclass(frozen=True)
class InferOutcome:
    """What became of a file of questions."""

    out: Path
    answered: int
    kept: int
    """Answers that the file held already."""
    cut_off: int
    """Answers that ended at `max_new_tokens`, in the whole file."""


def answer_prompt(
    model: Path,
    prompt: str,
    media: Sequence[MediaItem] = (),
    *,
    max_new_tokens: int = 512,
    lora: Path | None = None,
    config: Path | None = None,
    sampling: Sampling | None = None,
    hides_thoughts: bool = False,
) -> Answer:
    """The answer to one prompt about some media; `lora`: with these adapters; `config`: shown as this says; `sampling`
    and `hides_thoughts` as `run` takes them.

    Raises:
        MMError: The folder is not a model, or a medium cannot be read.
    """
    source = with_adapters(resolve_model(model), lora)
    generator = load_generator(source.folder, source.lora, rows_view(source, config).of_people())
    loader = generator.encoder.media(Path.cwd(), [Path(item.source).parent for item in media])
    settings: dict[str, Any] = {"sampling": _chosen(sampling, max_new_tokens), "hides_thoughts": hides_thoughts}
    ((_, answer),) = next(generator.answer([ask(prompt, media)], loader, batch_size=1, **settings))
    return answer


def run(
    model: Path,
    data: Path,
    out: Path,
    *,
    batch_size: int = 32,
    max_new_tokens: int = 512,
    media_dir: Path | None = None,
    overwrite: bool = False,
    lora: Path | None = None,
    config: Path | None = None,
    sampling: Sampling | None = None,
    hides_thoughts: bool = False,
    adapters: Mapping[str, Path] | None = None,
    plan: Path | None = None,
) -> InferOutcome | None:
    """Answer every row of `data` into the JSON lines of `out`; run again, it continues where it stopped.

    As ranks of one job, processes share the rows; or, with `plan`, the model.

    Args:
        model: A Hugging Face folder or a run.
        data: Rows as `read_questions` takes them.
        out: Written batch by batch, and put into the order of the input at the end.
        batch_size: Questions answered at a time.
        max_new_tokens: Most tokens of an answer.
        media_dir: Where relative media paths start; by default the folder of `data`.
        overwrite: Forget the answers that `out` holds.
        lora: Adapters to put beside the weights; None: the run's `inference.adapter`.
        config: Says how rows are laid out and shown, instead of the run's own.
        sampling: How tokens are chosen; what it leaves open is as the model's generation configuration says. Each row
            draws from a seed of its own, so that an answer depends on nothing but its row.
        hides_thoughts: Leave what the model thinks out of the answers.
        adapters: Folders of adapters by name; a row's `adapter` chooses one of them, a row without has none.
        plan: A YAML whose section `parallel` spreads the model over the ranks.

    Returns:
        How it went; None on ranks above 0.

    Raises:
        MMError: The folder is not a model, rows are bad, or `out` holds answers of another model or input.
    """
    _check_files(data, out, overwrite=overwrite)
    source = with_adapters(resolve_model(model), lora)
    view = rows_view(source, config)
    questions = read_questions(data, needs_answers=False, media_dir=media_dir, row_format=view.row_format(data))
    _check_adapters(questions, adapters or {}, data)
    settings: dict[str, Any] = {"sampling": _chosen(sampling, max_new_tokens), "hides_thoughts": hides_thoughts}
    fingerprint = f"{source.fingerprint()}-{max_new_tokens}"
    if config:
        fingerprint += view.mark
    fingerprint += _mark(settings, max_new_tokens, source, adapters or {})
    with joined_ranks(WAIT_S) as ranks:
        there = ranks.first("reading the answers", lambda: _answered(out, fingerprint, questions, overwrite=overwrite))
        missing = [question for question in questions if question.row not in there]
        share, writes = missing, ranks.is_first  # with a plan, ranks share the model, and answer all rows together
        if plan is None:
            share, writes = missing[ranks.rank :: ranks.world_size], True
        if share:
            generator = load_on_ranks(source, view, plan, ranks, adapters)
            media = generator.encoder.media(media_dir or data.parent, [data.parent])
            answers = AnswerFile(out, fingerprint) if writes else None
            _answer_into(answers, generator, share, media, batch_size, settings, is_shown=ranks.is_first)
        ranks.gather(None)  # all have written what they had to
        if not ranks.is_first:
            return None
        whole = AnswerFile(out, fingerprint)
        whole.sort()
    cut_off = sum(not record["finished"] for record in whole.records.values())
    return InferOutcome(out, len(missing), len(there), cut_off)


def _answer_into(
    answers: AnswerFile | None,
    generator: Generator,
    questions: Sequence[Question],
    media: MediaLoader,
    batch_size: int,
    settings: dict[str, Any],
    *,
    is_shown: bool,
) -> None:
    """Answer, and keep each batch at once; without a file, only help to answer."""
    for batch in answer_all(generator, questions, media, batch_size=batch_size, is_shown=is_shown, **settings):
        if answers is not None:
            answers.append(batch)


def _check_files(data: Path, out: Path, *, overwrite: bool) -> None:
    """Raise `UsageError` where answers must not be written."""
    if out.resolve() == data.resolve():
        raise UsageError("--out is the file of questions itself", where=str(out), way_out="Choose another file.")
    check_output_place(resolve_output(out), "--out")
    if overwrite:
        check_output_file(out, is_answers, "--out")


def _mark(settings: dict[str, Any], max_new_tokens: int, source: ModelSource, adapters: Mapping[str, Path]) -> str:
    """What tells answers with other settings apart; nothing where they are the usual ones."""
    usual = {"sampling": _chosen(None, max_new_tokens), "hides_thoughts": False}
    asks = "" if settings == usual else repr(tuple(settings.values()))
    for name, path in adapters.items():
        asks += f"{name}={replace(source, lora=path).fingerprint()}"
    if not asks:
        return ""
    return f"-{hashlib.sha256(asks.encode()).hexdigest()[:8]}"


def _check_adapters(questions: Sequence[Question], adapters: Mapping[str, Path], data: Path) -> None:
    """Raise `DataError` for the first row that names adapters which are not there."""
    for question in questions:
        if question.adapter is not None and question.adapter not in adapters:
            known = f"Known: {', '.join(adapters)}." if adapters else "Name their folder: --adapter NAME=FOLDER."
            what = f"there are no adapters '{question.adapter}'"
            raise DataError(what, where=f"{data.name}:{question.row}", key="adapter", way_out=known)


def _chosen(sampling: Sampling | None, max_new_tokens: int) -> Sampling:
    """With the longest answer, and with a seed: the same command gives the same answers."""
    asked = sampling or Sampling()
    return replace(asked, max_new_tokens=max_new_tokens, seed=asked.seed or 0)


def _answered(out: Path, fingerprint: str, questions: Sequence[Question], *, overwrite: bool) -> set[int]:
    """The rows that the file holds answers to."""
    if overwrite:
        out.unlink(missing_ok=True)
    answers = AnswerFile(out, fingerprint)
    answers.missing(questions)  # raises where they answer other questions
    return set(answers.records)
