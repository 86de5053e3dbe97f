"""Rows → questions for a model: the conversation up to the answer, the pictures, and the answer if the row has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from mindspeed_mm.core.errors import DataError, Problem
from mindspeed_mm.fsdp.data.data_utils.convert import convert_row
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.data.data_utils.rows.readers import RowReader, open_reader
from mindspeed_mm.fsdp.data.data_utils.rows.sources import RowFormat
from mindspeed_mm.fsdp.data.data_utils.sample import Place

SHOWN_PROBLEMS = 10
DEFAULT_TASK = "all"


@dataclass(frozen=True)
class Question:
    """What a model is asked.

    `messages` are as chat templates take them; a turn with pictures is a list of typed parts. `images` holds one path
    (or bytes, or `{"path" | "bytes"}`) for each image part, in order. `expected` is None where the row has no answer.
    """

    row: int
    id: str
    place: str
    task: str
    messages: tuple[dict[str, Any], ...]
    images: tuple[Any, ...]
    expected: str | None

    @property
    def text(self) -> str:
        """What the user said last, without the pictures."""
        return _text_of(self.messages[-1]["content"])

    @property
    def image_names(self) -> list[str]:
        """The pictures' paths; those that came as bytes have none."""
        return [image if isinstance(image, str) else "(embedded)" for image in self.images]


def ask(prompt: str, images: Sequence[Path] = ()) -> Question:
    """A question of one turn: the pictures, then the prompt."""
    parts = [*({"type": "image"} for _ in images), {"type": "text", "text": prompt}]
    message = {"role": "user", "content": parts if images else prompt}
    paths = tuple(str(path.absolute()) for path in images)
    return Question(0, "prompt", "--image", DEFAULT_TASK, (message,), paths, None)


def read_questions(path: Path, *, needs_answers: bool, media_dir: Path | None = None) -> list[Question]:
    """Every row of a JSONL, JSON, CSV or parquet file.

    A row is a conversation in one of the training formats, or `{"prompt", "image" | "images"}`; `id` and `task` are
    optional fields.

    Args:
        path: The file.
        needs_answers: Whether a row without the model's answer is an error.
        media_dir: Where relative media paths start; by default the file's folder. A picture that is not there is an
            error now, not in the middle of the work.

    Raises:
        DataError: Naming the bad rows (the first ten), or the file.
    """
    if not path.is_file():
        raise DataError("there is no such file", where=str(path), way_out="Give a JSONL file of conversations.")
    reader = open_reader(path)
    media_dir = media_dir or path.parent
    questions: list[Question] = []
    problems: list[Problem] = []
    for index in range(len(reader)):
        try:
            questions.append(_read_question(reader, index, needs_answers, media_dir))
        except DataError as error:
            problems += error.problems
    if problems:
        headline = f"{path}: {len(problems)} of {len(reader)} rows are bad"
        raise DataError(headline, problems=problems[:SHOWN_PROBLEMS])
    return questions


def load_images(question: Question, loader: MediaLoader) -> list[Image.Image]:
    """The question's pictures, decoded.

    Raises:
        DataError: Naming the row.
    """
    try:
        return [loader.load_image(image) for image in question.images]
    except DataError as error:
        raise DataError(error.problems[0].what, where=question.place, way_out=error.problems[0].way_out) from error


def _read_question(reader: RowReader, index: int, needs_answers: bool, media_dir: Path) -> Question:
    row, place = reader.read(index), reader.place(index)
    sample = convert_row(_as_conversation(row, needs_answers), RowFormat(), place)
    *messages, answer = sample.messages
    if any(item.kind != "image" for item in sample.media):
        raise DataError("holds videos or sounds; questions have pictures only", where=str(place), key="messages")
    images = tuple(item.source for item in sample.media)
    _check_images_exist(images, media_dir, place)
    expected = _text_of(answer["content"])
    return Question(
        row=place.row,
        id=str(row.get("id", place)),
        place=str(place),
        task=str(row.get("task", DEFAULT_TASK)),
        messages=tuple(messages),
        images=images,
        expected=expected if expected or needs_answers else None,
    )


def _as_conversation(row: Mapping[str, Any], needs_answers: bool) -> Mapping[str, Any]:
    """The row with its turns in a list that ends with the model's; a row that lacks an answer gets an empty one."""
    if isinstance(row.get("prompt"), str):
        row = _prompt_as_conversation(row)
    column = next((name for name in ("messages", "conversations") if isinstance(row.get(name), list)), None)
    if needs_answers or column is None or _ends_with_answer(row[column]):
        return row
    return {**row, column: [*row[column], {"role": "assistant", "content": ""}]}


def _prompt_as_conversation(row: Mapping[str, Any]) -> dict[str, Any]:
    images = row.get("images", row.get("image")) or []
    images = images if isinstance(images, list) else [images]
    prompt = row["prompt"]
    missing = 0 if "<image>" in prompt else len(images)
    turns = [{"role": "user", "content": "<image>" * missing + prompt}]
    if isinstance(row.get("answer"), str):
        turns.append({"role": "assistant", "content": row["answer"]})
    return {**row, "messages": turns, "images": images}


def _ends_with_answer(turns: list[Any]) -> bool:
    last = turns[-1] if turns and isinstance(turns[-1], dict) else {}
    return last.get("role", last.get("from")) in ("assistant", "gpt")


def _check_images_exist(images: Sequence[Any], media_dir: Path, place: Place) -> None:
    for image in images:
        name = image.get("path") if isinstance(image, dict) else image
        if isinstance(name, str) and "://" not in name and not (media_dir / name).exists():
            raise DataError(
                f"'{name}' not found", where=str(place), key="images", way_out=f"Relative paths start at '{media_dir}'."
            )


def _text_of(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)
