"""`mm infer --data` of a model that answers in words and draws by denoising: every row of a file, one after the other.

A row whose own answer is a picture is answered by one, any other in words. The model is shown what training showed it:
the parts of the row in front of its answer. Pictures lie in a folder beside the answers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from mindspeed_mm.core.artifacts import atomic_write_bytes, make_writable_folder
from mindspeed_mm.core.errors import DataError, Problem, UsageError
from mindspeed_mm.core.file_writing import any_of, check_output_file, check_output_place, first_line_has
from mindspeed_mm.core.folder_writing import resolve_output
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem, Sample
from mindspeed_mm.fsdp.data.datasets.bagel.parts import RowPart, parts_of_sample
from mindspeed_mm.fsdp.sampling.answers.live import Answer
from mindspeed_mm.fsdp.sampling.answers.questions import SHOWN_PROBLEMS, Question, read_questions
from mindspeed_mm.fsdp.sampling.unified import Context, UnifiedSampler
from mindspeed_mm.fsdp.utils.media_files import image_bytes
from mindspeed_mm.fsdp.utils.work_progress import WorkProgress
from mindspeed_mm.tasks.answer.answering import AnswerFile
from mindspeed_mm.tasks.answer.infer import InferOutcome
from mindspeed_mm.tasks.answer.unified import drawing_for, sampler_of, words_for
from mindspeed_mm.tasks.answer.view import rows_view
from mindspeed_mm.tasks.model_source import resolve_model
from mindspeed_mm.tasks.requests.infer import InferRequest

_PICTURE = {"type": "image"}
_IN_A_ROW = "<image>"
"""What rows say where the answer is a picture."""
_KEYS = ("row", "id", "question", "images", "answer", "finished", "model")
_is_answers = any_of(first_line_has(*_KEYS), first_line_has(*_KEYS, "picture"))


def run(request: InferRequest) -> InferOutcome:
    """Answer every row of a request's `data` into the JSON lines of its `out`; run again, it continues where it
    stopped.

    A drawn answer's line has `picture`, the PNG file in the folder that is called as `out` is without its ending. Each
    row draws from a seed of its own.

    Raises:
        MMError: The folder is not a model, rows are bad, or `out` holds answers of another model or input.
    """
    data, out = request.data, request.out
    assert data is not None and out is not None  # as was checked
    folder = _checked_folder(data, out, overwrite=request.overwrite)
    source = resolve_model(request.model)
    row_format = rows_view(source, request.config).row_format(data)
    questions = read_questions(
        data, needs_answers=False, media_dir=request.media_dir, row_format=row_format, draws=True
    )
    _check_answers(questions)
    if request.overwrite:
        out.unlink(missing_ok=True)
    answers = AnswerFile(out, f"{source.fingerprint()}-{_mark(request)}")
    missing = answers.missing(questions)
    kept = len(answers.records)
    if missing:
        root = request.media_dir or data.parent
        media = MediaLoader(root, [data.parent], called="--media-dir")
        progress = WorkProgress("answers", total=len(missing))
        with torch.inference_mode():
            sampler = sampler_of(request, source)
            for question in missing:
                _answer(request, sampler, question, media, answers, folder)
                progress.advance(1)
        progress.end()
    answers.sort()
    cut_off = sum(not record["finished"] for record in answers.records.values())
    return InferOutcome(out, len(missing), kept, cut_off)


def _answer(
    request: InferRequest,
    sampler: UnifiedSampler,
    question: Question,
    media: MediaLoader,
    answers: AnswerFile,
    folder: Path,
) -> None:
    """Answer one row, and keep the answer."""
    context, size = _shown(sampler, question, media)
    seed = derive_seed(request.seed or 0, question.row) >> 1
    if not question.drawn:
        text, finished = sampler.answer(context, words_for(request, seed))
        answers.append([(question, Answer((), text, finished))])
        return
    pixels = sampler.draw(context, drawing_for(request, size or sampler.usual_size(), seed))
    make_writable_folder(folder)
    picture = folder / f"{question.row:05d}.png"
    atomic_write_bytes(picture, image_bytes(pixels.permute(1, 2, 0).numpy()))
    answers.append([(question, Answer((), _IN_A_ROW, True))], picture=f"{folder.name}/{picture.name}")


def _shown(sampler: UnifiedSampler, question: Question, media: MediaLoader) -> tuple[Context, tuple[int, int] | None]:
    """The sequence up to the answer; with pictures the size of the last one."""
    context, size = sampler.start(), None
    parts = _parts_of(question)
    for number, part in enumerate(parts):
        if part.kind == "text":
            sampler.add_text(context, part.content)
        elif part.kind == "seen":
            given = number > 0 and parts[number - 1].kind == "given"
            size = sampler.add_picture(context, media.load_image(part.content), given=given)
    return context, size


def _parts_of(question: Question) -> list[RowPart]:
    """What stands in front of the answer, as training has it: a picture that is given comes before the same one that
    is seen.

    Raises:
        DataError: The row has media that are no pictures.
    """
    asked = question.sample
    messages = [*asked.messages, {"role": "assistant", "content": [_PICTURE] if question.drawn else "."}]
    weights: list[float | None] = [float(message["role"] == "assistant") for message in messages]
    answer = [MediaItem("image", None)] if question.drawn else []
    try:
        parts = parts_of_sample(Sample(asked.place, messages, weights, [*asked.media, *answer]))
    except DataError as error:
        raise DataError(f"{error}", where=str(asked.place)) from error
    return [part for part in parts[:-1] if part.kind != "drawn"]


def _checked_folder(data: Path, out: Path, *, overwrite: bool) -> Path:
    """The folder of pictures. Raises `UsageError` where answers must not be written."""
    if out.resolve() == data.resolve():
        raise UsageError("--out is the file of questions itself", where=str(out), way_out="Choose another file.")
    if not out.suffix:
        way_out = f"Name a file with an ending: {out}.jsonl."
        raise UsageError("pictures go into a folder of this name", where=str(out), key="--out", way_out=way_out)
    check_output_place(resolve_output(out), "--out")
    if overwrite:
        check_output_file(out, _is_answers, "--out")
    return out.with_suffix("")


def _check_answers(questions: Sequence[Question]) -> None:
    """Raise `DataError` naming rows that are answered by more than words or one picture."""
    problems = [
        Problem(
            "the answer is more than one picture, and a question is answered by words or by a picture",
            where=str(question.sample.place),
            key="messages",
            way_out="Leave such rows out, or ask for one of the two.",
        )
        for question in questions
        if question.drawn > 1 or (question.drawn and question.expected)
    ]
    if problems:
        headline = f"{len(problems)} of {len(questions)} rows cannot be asked"
        raise DataError(headline, problems=problems[:SHOWN_PROBLEMS])


def _mark(request: InferRequest) -> str:
    """What tells answers with other settings apart."""
    settings = (words_for(request, request.seed or 0), drawing_for(request, None, 0), request.size)
    return hashlib.sha256(repr(settings).encode()).hexdigest()[:8]
