"""Rows → questions for a model: the conversation up to the answer, its media, and the answer if the row has one.

Speech with transcripts is read as LibriSpeech is published: FLAC files beside a `*.trans.txt` of each chapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import DataError, Problem
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.convert import convert_row
from mindspeed_mm.fsdp.data.data_utils.prompts import with_answer, words_of
from mindspeed_mm.fsdp.data.data_utils.rows.formats import RowFormat
from mindspeed_mm.fsdp.data.data_utils.rows.media_parts import split_text, without_media
from mindspeed_mm.fsdp.data.data_utils.rows.readers import RowReader, open_reader
from mindspeed_mm.fsdp.data.data_utils.sample import (
    MEDIA_KINDS,
    MediaItem,
    NotesReported,
    RowLocation,
    Sample,
    count_media,
)

SHOWN_PROBLEMS = 10
DEFAULT_TASK = "all"
_LONGEST_PATH = 1000
"""Longer texts of media are base64."""
_YAML_SECTION = "data.dataset_param"


@dataclass(frozen=True)
class Question:
    """What a model is asked. `expected` is None where the row has no answer."""

    row: int
    id: str
    task: str
    sample: Sample
    """The conversation up to the answer, and its media."""
    expected: str | None
    adapter: str | None = None
    """Name of the adapters that it is answered with."""
    drawn: int = 0
    """Pictures that its answer in the row holds."""

    @property
    def messages(self) -> list[JsonObject]:
        """As chat templates take them; a turn with media is a list of typed parts."""
        return self.sample.messages

    @property
    def images(self) -> list[object]:
        """Sources of the pictures, in order."""
        return [item.source for item in self.sample.media if item.kind == "image"]

    @property
    def text(self) -> str:
        """What the user said last, without the media."""
        return words_of(self.messages[-1]["content"])

    @property
    def image_names(self) -> list[str]:
        """The pictures' paths; those that came as bytes have none."""
        return [image if isinstance(image, str) else "(embedded)" for image in self.images]


def ask(prompt: str, media: Sequence[MediaItem] = ()) -> Question:
    """A question of one turn; a speech recogniser needs no prompt.

    Raises:
        DataError: As `user_turn` says.
    """
    place = RowLocation("--prompt", 1)
    message, in_order = user_turn(prompt, media, str(place))
    return Question(0, "prompt", DEFAULT_TASK, Sample(place, [message], [0.0], in_order), None)


def user_turn(text: str, media: Sequence[MediaItem], where: str) -> tuple[JsonObject, list[MediaItem]]:
    """A user's message and its media in their order: where the text marks them (`<image>`, as rows do), else before it.
    Marks of a kind that is not given are text.

    Raises:
        DataError: The text marks more or fewer media of a kind than are given.
    """
    waiting: dict[str, list[MediaItem]] = {kind: [] for kind in MEDIA_KINDS}
    for item in media:
        waiting[item.kind].append(item)
    pieces = without_media(split_text(text), [kind for kind, items in waiting.items() if not items])
    if isinstance(pieces, str):
        return {"role": "user", "content": _media_first(text, media)}, list(media)
    marked = [piece["type"] for piece in pieces if piece["type"] != "text"]
    for kind, items in waiting.items():
        if marked.count(kind) != len(items):
            raise DataError(
                f"the text holds {marked.count(kind)} × <{kind}>, and {len(items)} of that kind are given",
                where=where,
                way_out=f"Give one file for each <{kind}>, or leave the marks out: media then stand before the text.",
            )
    return {"role": "user", "content": pieces}, [waiting[kind].pop(0) for kind in marked]


def _media_first(text: str, media: Sequence[MediaItem]) -> str | list[dict[str, object]]:
    """The content of a turn whose text marks no media."""
    if not media:
        return text
    parts: list[dict[str, Any]] = [{"type": item.kind} for item in media]
    if text:
        parts.append({"type": "text", "text": text})
    return parts


def read_questions(
    path: Path,
    *,
    needs_answers: bool,
    media_dir: Path | None = None,
    row_format: RowFormat | None = None,
    media_key: str = "--media-dir",
    draws: bool = False,
) -> list[Question]:
    """Every row of a JSONL, JSON, CSV or parquet file.

    A row is a conversation in one of the training formats, or a `prompt` with `images`, `videos` and `audios` (or one
    `image`, `video`, `audio`); `id` and `task` are optional fields.

    Args:
        path: The file.
        needs_answers: Whether a row without the model's answer is an error.
        media_dir: Where relative media paths start; by default the file's folder. A picture that is not there is an
            error now, not in the middle of the work.
        row_format: How rows are laid out; None: in one of the usual spellings.
        media_key: The option or key that names the folder of media.
        draws: Placeholders in the model's turns stand for media, as in training on pictures as answers.

    Raises:
        DataError: Naming the bad rows (the first ten), or the file.
    """
    if not path.is_file():
        what = "is a folder, not a file of rows" if path.is_dir() else "there is no such file"
        raise DataError(what, where=str(path), way_out="Give a JSONL file of conversations.")
    if media_dir is not None and not media_dir.is_dir():
        way_out = "Name the folder that media paths start at."
        raise DataError("there is no such folder", where=str(media_dir), key=media_key, way_out=way_out)
    reader = open_reader(path)
    media_dir = media_dir or path.parent
    notes = NotesReported()
    questions: list[Question] = []
    problems: list[Problem] = []
    for index in range(len(reader)):
        try:
            question = _read_question(reader, index, row_format or RowFormat(), needs_answers, notes, draws=draws)
            _check_media_exist(question.sample, media_dir, media_key)
            questions.append(question)
        except DataError as error:
            problems += map(as_asked, error.problems)
    if problems:
        headline = f"{path}: {len(problems)} of {len(reader)} rows are bad"
        if len(problems) > SHOWN_PROBLEMS:
            headline += f"; the first {SHOWN_PROBLEMS} are"
        raise DataError(headline, problems=problems[:SHOWN_PROBLEMS])
    return questions


def as_asked(problem: Problem) -> Problem:
    """A problem of rows in the words of a command that asks a model: keys of a YAML are out of reach until an option
    names one."""
    if _YAML_SECTION not in problem.way_out + problem.key:
        return problem
    return replace(problem, way_out=f"{problem.way_out} This is a key of a YAML: --config YAML names it.".strip())


def _read_question(
    reader: RowReader, index: int, row_format: RowFormat, needs_answers: bool, notes: NotesReported, *, draws: bool
) -> Question:
    row, place = reader.read(index), reader.place(index)
    sample, answer = question_of(row, row_format, place, needs_answer=needs_answers, draws=draws)
    if needs_answers and count_media([answer]):
        raise DataError(
            "the answer holds media, and answers are scored as words",
            where=str(place),
            key="messages",
            way_out="Leave such rows out.",
        )
    notes.report(sample)
    expected: str | None = words_of(answer["content"])
    if not expected and not needs_answers:
        expected = None
    return Question(
        row=place.row,
        id=text_field(row, "id", str(place)),
        task=text_field(row, "task", DEFAULT_TASK),
        sample=sample,
        expected=expected,
        adapter=text_field(row, "adapter", "") or None,
        drawn=count_media([answer]),
    )


def text_field(row: Mapping[str, object], name: str, default: str) -> str:
    """A value of a row as text; one that is null counts as not there."""
    value = row.get(name)
    if value is None:
        return default
    return str(value)


def question_of(
    row: JsonObject, row_format: RowFormat, place: RowLocation, *, needs_answer: bool, draws: bool = False
) -> tuple[Sample, JsonObject]:
    """A row as the conversation up to the model's last turn, and that turn's message; `draws` as of `read_questions`.

    Raises:
        DataError: The row is off, or has no answer although one is needed.
    """
    row, row_format = with_answer(row, row_format, place, needs_answer=needs_answer)
    sample = convert_row(row, row_format, place, rewarded=True, draws=draws)
    *messages, answer = sample.messages
    weights: list[float | None] = [0.0] * len(messages)
    media = sample.media[: count_media(messages)]
    question = Sample(place, messages, weights, media, sample.tools, objects=sample.objects, notes=sample.notes)
    return question, answer


def _check_media_exist(sample: Sample, media_dir: Path, media_key: str) -> None:
    for item in sample.media:
        name = item.source.get("path") if isinstance(item.source, dict) else item.source
        if not isinstance(name, str) or len(name) >= _LONGEST_PATH or "://" in name:
            continue  # no path
        if not (media_dir / name).exists():
            way_out = f"Relative paths start at '{media_dir}'; {media_key} FOLDER names another."
            raise DataError(f"'{name}' not found", where=str(sample.place), key=f"{item.kind}s", way_out=way_out)


# --- speech with transcripts ------------------------------------------------------------------------------------------


_SOUND_ENDING = ".flac"


def read_transcripts(folder: Path) -> list[Question]:
    """Every utterance of a folder: the sound alone is shown, its transcript is the expected answer. Utterances are
    counted by the subset that they lie in (`test-clean`), where the folder holds subsets.

    Args:
        folder: Of one subset, or of several.

    Raises:
        DataError: There is no transcript, a line is not an id with words, or a sound is missing.
    """
    files = sorted(folder.rglob("*.trans.txt"))
    if not files:
        raise DataError(
            "is a folder without transcripts (*.trans.txt)",
            where=str(folder),
            way_out="Give a file of rows, or a folder as LibriSpeech has them.",
        )
    questions: list[Question] = []
    problems: list[Problem] = []
    for file in files:
        subset = file.relative_to(folder).parts[:-3]
        for number, line in enumerate(_lines(file), 1):
            name, _, words = line.strip().partition(" ")
            sound = file.parent / f"{name}{_SOUND_ENDING}"
            if not words or not sound.is_file():
                what = f"'{sound.name}' not found" if words else "is not an utterance's id with its words"
                problems.append(Problem(what, where=f"{file}:{number}"))
                continue
            message = {"role": "user", "content": [{"type": "audio"}]}
            media = [MediaItem("audio", str(sound.absolute()))]
            sample = Sample(RowLocation(str(file), number), [message], [0.0], media)
            questions.append(Question(len(questions) + 1, name, "/".join(subset) or DEFAULT_TASK, sample, words))
    if problems:
        headline = f"{folder}: {len(problems)} of {len(problems) + len(questions)} utterances are bad"
        raise DataError(headline, problems=problems[:SHOWN_PROBLEMS])
    return questions


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        way_out = "Take the file as it is published."
        raise DataError(f"cannot be read: {error}", where=str(file), way_out=way_out) from error
