"""`mm infer`: one answer to a picture and a prompt, or a file of answers to a file of questions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mindspeed_mm.core.errors import DataError, UsageError
from mindspeed_mm.core.file_writing import check_output_file, check_output_place, first_line_has
from mindspeed_mm.core.folder_writing import resolve_output
from mindspeed_mm.core.json_file import JsonObject
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
from mindspeed_mm.tasks.requests.infer import QUESTIONS_AT_A_TIME, InferRequest
from mindspeed_mm.tasks.requests.shared import adapters_of

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


def answer_prompt(request: InferRequest) -> Answer:
    """The answer to the one prompt of a request, about its media.

    Raises:
        MMError: The folder is not a model, or a medium cannot be read.
    """
    source = with_adapters(resolve_model(request.model), request.lora)
    generator = load_generator(source.folder, source.lora, rows_view(source, request.config).of_people())
    media = media_items(request)
    loader = generator.encoder.media(Path.cwd(), [Path(item.source).parent for item in media])
    question = ask(request.prompt, media)
    ((_, answer),) = next(generator.answer([question], loader, batch_size=1, **_settings(request)))
    return answer


def media_items(request: InferRequest) -> list[MediaItem]:
    """The files that go with a request's prompt, as questions hold them."""
    return [MediaItem(kind, str(path.absolute())) for kind, path in request.media]


def sampling_of(request: InferRequest) -> Sampling:
    """How the tokens of a request's answers are chosen: with a seed, so that the same command gives the same answers.

    Raises:
        UsageError: Logits cannot be divided by the temperature, or there are more beams than fit.
    """
    seed, top_k, beams = request.seed or 0, request.top_k, request.beams
    return Sampling(request.longest_answer, request.temperature, request.top_p, seed, top_k, beams=beams)


def run(request: InferRequest) -> InferOutcome | None:
    """Answer every row of a request's `data` into the JSON lines of its `out`; run again, it continues where it
    stopped.

    As ranks of one job, processes share the rows; or, with `plan`, the model. What the request leaves open of the
    sampling is as the model's generation configuration says. Each row draws from a seed of its own, so that an answer
    depends on nothing but its row.

    Returns:
        How it went; None on ranks above 0.

    Raises:
        MMError: The folder is not a model, rows are bad, or `out` holds answers of another model or input.
    """
    request.check_questions()
    data, out, plan, media_dir = request.data, request.out, request.plan, request.media_dir
    assert data is not None and out is not None  # as was checked
    _check_files(data, out, overwrite=request.overwrite)
    adapters, settings = adapters_of(request.adapters), _settings(request)
    source = with_adapters(resolve_model(request.model), request.lora)
    view = rows_view(source, request.config)
    row_format = view.row_format(data)
    questions = read_questions(data, needs_answers=False, media_dir=media_dir, row_format=row_format, draws=view.draws)
    _check_adapters(questions, adapters, data)
    fingerprint = f"{source.fingerprint()}-{request.longest_answer}"
    if request.config:
        fingerprint += view.mark
    fingerprint += _mark(settings, source, adapters)
    with joined_ranks(WAIT_S) as ranks:
        there = ranks.first(
            "reading the answers", lambda: _answered(out, fingerprint, questions, overwrite=request.overwrite)
        )
        missing = [question for question in questions if question.row not in there]
        share, writes = missing, ranks.is_first  # with a plan, ranks share the model, and answer all rows together
        if plan is None:
            share, writes = missing[ranks.rank :: ranks.world_size], True
        if share:
            generator = load_on_ranks(source, view, plan, ranks, adapters)
            media = generator.encoder.media(media_dir or data.parent, [data.parent])
            answers = AnswerFile(out, fingerprint) if writes else None
            size = request.batch_size or QUESTIONS_AT_A_TIME
            _answer_into(answers, generator, share, media, size, settings, is_shown=ranks.is_first)
        ranks.gather(None)  # all have written what they had to
        if not ranks.is_first:
            return None
        whole = AnswerFile(out, fingerprint)
        whole.sort()
    cut_off = sum(not record["finished"] for record in whole.records.values())
    return InferOutcome(out, len(missing), len(there), cut_off)


def _settings(request: InferRequest) -> JsonObject:
    """How a request's questions are answered, as `Generator.answer` takes it."""
    settings: JsonObject = {"sampling": sampling_of(request), "hides_thoughts": request.hide_thoughts}
    return settings | {"stops": request.stops} if request.stops else settings


def _answer_into(
    answers: AnswerFile | None,
    generator: Generator,
    questions: Sequence[Question],
    media: MediaLoader,
    batch_size: int,
    settings: JsonObject,
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


def _mark(settings: JsonObject, source: ModelSource, adapters: Mapping[str, Path]) -> str:
    """What tells answers with other settings apart; nothing where they are the usual ones."""
    usual = {"sampling": Sampling(settings["sampling"].max_new_tokens, seed=0), "hides_thoughts": False}
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


def _answered(out: Path, fingerprint: str, questions: Sequence[Question], *, overwrite: bool) -> set[int]:
    """The rows that the file holds answers to."""
    if overwrite:
        out.unlink(missing_ok=True)
    answers = AnswerFile(out, fingerprint)
    answers.missing(questions)  # raises where they answer other questions
    return set(answers.records)
