"""`mm evaluate --recogniser`: a model says texts, a recogniser writes down what it hears, and words are compared."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mindspeed_mm.core.artifacts import atomic_write_bytes, make_writable_folder
from mindspeed_mm.core.errors import DataError, MMError, Problem, UsageError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.data.data_utils.rows.readers import open_reader
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem
from mindspeed_mm.fsdp.sampling.answers.asking import QuestionEncoder, RowsView
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.live import Answer
from mindspeed_mm.fsdp.sampling.answers.questions import DEFAULT_TASK, Question, ask, text_field
from mindspeed_mm.fsdp.sampling.answers.scored import (
    Evaluation,
    check_evaluation_folder,
    evaluate_answers,
    write_evaluation,
)
from mindspeed_mm.fsdp.sampling.answers.scoring import Comparison
from mindspeed_mm.fsdp.sampling.speech.voice import Reference, SpeechJob, Voice, is_speaker, load_voice
from mindspeed_mm.fsdp.utils.media_files import wave_bytes
from mindspeed_mm.fsdp.utils.work_progress import WorkProgress
from mindspeed_mm.tasks.answer.answering import answer_all
from mindspeed_mm.tasks.answer.generation import load_generator
from mindspeed_mm.tasks.answer.view import rows_view
from mindspeed_mm.tasks.evaluate.evaluate import compared_with, read_others
from mindspeed_mm.tasks.evaluate.folder import results_folder
from mindspeed_mm.tasks.model_source import resolve_model
from mindspeed_mm.tasks.requests.evaluate import EvaluateRequest

SOUNDS = "sounds"
_READ = ("text", "id", "task", "speaker", "ref_audio", "ref_text", "instruct")
_OF_TRAINING = ("audio", "audio_codes", "speech_token", "language", "utt")
"""Columns of rows for training that do not say what is to be said or how."""
_SHOWN_PROBLEMS = 10
_LONGEST_TRANSCRIPT = 512


@dataclass(frozen=True)
class SpokenLine:
    """A text that is to be said."""

    row: int
    id: str
    task: str
    place: str
    job: SpeechJob


def run(request: EvaluateRequest) -> Evaluation:
    """Score how well a recogniser understands what a model says. Sounds stay in `sounds/` of the results' folder.

    Raises:
        MMError: A folder is not a model that speaks or hears, rows are bad, `against` holds other texts, or `out`
            cannot be written.
    """
    data, hears = request.data, request.recogniser
    assert data is not None and hears is not None  # as was checked
    comparison = Comparison(request.metric or "wer", request.ignore_case, request.ignore_punctuation)
    source, recogniser = resolve_model(request.folder), resolve_model(hears)
    out = request.out or results_folder(source.run, source.folder)
    check_evaluation_folder(out)
    voice = load_voice(source.folder, rows_view(source, request.config).of_people(), "--recogniser")
    most = request.max_new_tokens or voice.usual_tokens
    lines, unread = read_lines(data, request.media_dir or data.parent, most)
    _check_hearing(recogniser.folder, rows_view(recogniser))
    questions = [Question(line.row, line.id, line.task, ask(line.job.text).sample, line.job.text) for line in lines]
    others = None if request.against is None else read_others(request.against, questions, comparison)
    for line in lines:
        with _naming_row(line.place):
            voice.checked(line.job)
    make_writable_folder(out / SOUNDS)
    began = time.monotonic()
    cut_off = _speak(voice, lines, out / SOUNDS)
    del voice  # two models need not fit at once
    view = rows_view(recogniser)
    heard = _hear(recogniser.folder, view, lines, out / SOUNDS, request.questions_at_a_time)
    facts: JsonObject = {
        "model": str(source.folder.absolute()),
        "recogniser": str(recogniser.folder.absolute()),
        "data": request.data_name or str(data.absolute()),
        "media_dir": str((request.media_dir or data.parent).absolute()),
        "max_new_tokens": most,
        "cut_off": cut_off,
        "seconds": round(time.monotonic() - began, 3),
    }
    evaluation = evaluate_answers([(question, heard[question.row]) for question in questions], facts, comparison)
    if others is not None:
        evaluation = compared_with(evaluation, others)
    if unread:
        remark = f"columns without effect on speech: {', '.join(unread)}"
        evaluation = replace(evaluation, remarks=(*evaluation.remarks, remark))
    write_evaluation(evaluation, out)
    return evaluation


def read_lines(path: Path, media_dir: Path, most_tokens: int) -> tuple[list[SpokenLine], list[str]]:
    """The texts of a file of rows, and columns that are not read.

    A row has `text`, and may have `id`, `task`, `speaker` (a voice by name), `ref_audio` (a recording of one, or a
    list with one), `ref_text` (its words) and `instruct` (how to speak). Each draws from a seed of its own.

    Raises:
        DataError: Naming the bad rows (the first ten), or the file.
    """
    reader = open_reader(path)
    lines: list[SpokenLine] = []
    problems: list[Problem] = []
    unread: dict[str, None] = {}
    loader = MediaLoader(media_dir, (path.parent,))
    for index in range(len(reader)):
        try:
            row, place = reader.read(index), reader.place(index)
            unread |= dict.fromkeys(name for name in row if name not in (*_READ, *_OF_TRAINING))
            lines.append(_line(row, place.row, str(place), loader, most_tokens))
        except DataError as error:
            problems += error.problems
    if problems:
        headline = f"{path}: {len(problems)} of {len(reader)} rows are bad"
        raise DataError(headline, problems=problems[:_SHOWN_PROBLEMS])
    return lines, list(unread)


def _line(row: JsonObject, number: int, place: str, loader: MediaLoader, most_tokens: int) -> SpokenLine:
    text = row.get("text")
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{text!r:.80} is not a text to say", where=place, key="text", way_out="Repair the row.")
    for name in ("speaker", "ref_text", "instruct"):
        if not isinstance(row.get(name), str | None):
            raise DataError(f"{row[name]!r:.80} is not text", where=place, key=name, way_out="Repair the row.")
    sampling = Sampling(most_tokens, seed=0).of_row(number)
    reference = _reference(row, place, loader)
    job = SpeechJob(text, sampling, row.get("speaker") or None, reference, row.get("instruct") or "")
    return SpokenLine(number, text_field(row, "id", place), text_field(row, "task", DEFAULT_TASK), place, job)


def _reference(row: JsonObject, place: str, loader: MediaLoader) -> Reference | None:
    given, words = row.get("ref_audio"), row.get("ref_text")
    if isinstance(given, list) and len(given) == 1:
        given = given[0]
    if not given:
        if words:
            raise DataError("there is no recording that it is said in", where=place, key="ref_text")
        return None
    if not isinstance(given, str):
        raise DataError(f"{given!r:.80} is not the path of one recording", where=place, key="ref_audio")
    with _naming_row(place), loader.open(given) as file:
        return Reference(file.read(), given, words)


@contextmanager
def _naming_row(place: str) -> Iterator[None]:
    """Errors that pass through here name a row."""
    try:
        yield
    except MMError as error:
        error.change_problems(lambda problem: replace(problem, where=place))
        raise


def _speak(voice: Voice, lines: Sequence[SpokenLine], folder: Path) -> int:
    """Write what the model says, a file a row; returns how many were cut off."""
    progress, cut_off = WorkProgress("texts", total=len(lines)), 0
    for line in lines:
        with _naming_row(line.place):
            said = voice.speak(line.job)
        atomic_write_bytes(_sound(folder, line), wave_bytes(said.sound))
        cut_off += not said.finished
        progress.advance(1)
    progress.end()
    return cut_off


def _check_hearing(folder: Path, view: RowsView) -> None:
    """Raise `UsageError` for a recogniser that hears nothing: before the texts are said, which may take hours."""
    if is_speaker(folder) or not QuestionEncoder(folder, view).hears:
        way_out = "Name a folder of a speech recogniser, or a run that trained one."
        raise UsageError("the model hears nothing", where=str(folder), key="--recogniser", way_out=way_out)


def _hear(
    folder: Path, view: RowsView, lines: Sequence[SpokenLine], sounds: Path, rows_at_a_time: int
) -> dict[int, Answer]:
    """Row → what the recogniser writes down."""
    generator = load_generator(folder, None, view)
    questions = []
    for line in lines:
        item = MediaItem("audio", str(_sound(sounds, line).absolute()))
        questions.append(Question(line.row, line.id, line.task, ask("", [item]).sample, line.job.text))
    media, greedy = generator.encoder.media(sounds), Sampling(_LONGEST_TRANSCRIPT, temperature=0)
    answers: dict[int, Answer] = {}
    for batch in answer_all(generator, questions, media, sampling=greedy, batch_size=rows_at_a_time):
        answers |= {question.row: answer for question, answer in batch}
    return answers


def _sound(folder: Path, line: SpokenLine) -> Path:
    return folder / f"{line.row:06d}.wav"
