"""Models that a caller in Python names, and what they are asked: prompts, pictures, rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_mm.core.artifacts import DRAWN_MANIFEST, read_jsonl
from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.model_kinds import GENERATOR, LANGUAGE, UNIFIED, ModelKind
from mindspeed_mm.tasks.given.arguments import refuse_unknown
from mindspeed_mm.tasks.given.configuration import resolved
from mindspeed_mm.tasks.given.rows import (
    is_in_memory,
    is_picture,
    listed_rows,
    named_path,
    picture_bytes,
    with_ids,
    write_rows,
)
from mindspeed_mm.tasks.given.run_view import Run
from mindspeed_mm.tasks.model_kind import kind_of_path
from mindspeed_mm.tasks.requests.infer import InferRequest


def model_path(model: str | os.PathLike[str]) -> Path:
    """A run's folder, or the path itself.

    Raises:
        UsageError: It is neither, or a run that kept nothing.
    """
    try:
        return named_path(os.fspath(model), "model")
    except TypeError as error:
        what = f"{type(model).__name__} is neither a run nor a path"
        if isinstance(model, Run):
            what = "this run kept nothing"
        raise UsageError(
            what,
            key="model",
            way_out="Set training.save to keep checkpoints, or name a folder; the model that was trained is run.model.",
        ) from error


def question_file(rows: object, folder: Path) -> Path:
    """The file of rows; those in memory are stored in `folder`."""
    if isinstance(rows, str | os.PathLike):
        return named_path(rows, "rows")
    return write_rows(with_ids(listed_rows(rows, "question")), folder, "questions", stores_media=False)


def picture_files(images: object, folder: Path) -> tuple[Path, ...]:
    """The files of pictures; those in memory are stored in `folder`."""
    listed = _listed(images)
    return tuple(_picture(image, folder, number) for number, image in enumerate(listed))


def media_files(paths: object, name: str) -> tuple[Path, ...]:
    """The files of videos or sounds; one or several."""
    return tuple(named_path(path, name) for path in _listed(paths))


def _listed(given: Any) -> Sequence[Any]:
    """One thing may be given without a list."""
    if isinstance(given, list | tuple):
        return given
    return [given]


def _picture(image: object, folder: Path, number: int) -> Path:
    if isinstance(image, str | os.PathLike):
        return named_path(image, "images")
    if not is_picture(image):
        raise UsageError(f"{type(image).__name__} is not a picture", key="images", way_out="Give paths or PIL images.")
    path = folder / f"{number}.png"
    path.write_bytes(picture_bytes(image))
    return path


@dataclass(frozen=True)
class Asked:
    """What `mm.infer` is asked; fields as its arguments."""

    model: Path
    prompt: Any
    pictures: tuple[Path, ...]
    clips: tuple[Path, ...]
    sounds: tuple[Path, ...]
    rows: object
    out: Path | None
    folder: Path
    """For what lives as long as the call."""
    max_new_tokens: int | None
    batch_size: int | None
    lora: Path | None
    config: Path | None
    overwrite: bool
    sampling: Mapping[str, object]
    function: Callable[..., object]
    """`mm.infer`, for messages about its arguments."""

    def answered(self) -> Any:
        """What a model of this kind makes of it."""
        return ANSWERS[kind_of_path(self.model)](self)


def _answer(asked: Asked) -> object:
    """Answers of a language model, to a prompt or to rows."""
    refuse_unknown(asked.sampling, asked.function, "is not an argument for a language model")
    from mindspeed_mm.tasks.answer import infer as task  # torch

    media: dict[str, Any] = {"images": asked.pictures, "videos": asked.clips, "audios": asked.sounds}
    for key, paths in media.items():
        if paths and asked.rows is not None:
            raise UsageError(f"{key} go with a prompt", key=key, way_out="Name them in the rows.")
    if (asked.prompt is None and not any(media.values())) == (asked.rows is None):
        raise UsageError("give either a prompt or rows", key="prompt")
    same: JsonObject = {"max_new_tokens": asked.max_new_tokens, "lora": asked.lora, "config": asked.config}
    if asked.rows is None:
        if not isinstance(asked.prompt, str | None):
            raise UsageError("a language model answers one prompt", key="prompt", way_out="Give rows for several.")
        prompts: tuple[str, ...] = ()
        if asked.prompt is not None:
            prompts = (asked.prompt,)
        return task.answer_prompt(InferRequest(asked.model, prompts=prompts, **media, **same))
    answers = asked.out or asked.folder / "answers.jsonl"
    media_dir = None
    if is_in_memory(asked.rows):  # there is no file beside which media could lie
        media_dir = Path.cwd()
    task.run(
        InferRequest(
            asked.model,
            data=question_file(asked.rows, asked.folder),
            out=answers,
            batch_size=asked.batch_size,
            media_dir=media_dir,
            overwrite=asked.overwrite,
            **same,
        )
    )
    return read_jsonl(answers)


def _draw(asked: Asked) -> list[Path]:
    """Samples of a generator; returns their files in the order of the prompts."""
    from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments  # pydantic
    from mindspeed_mm.tasks.draw import generate  # torch

    if asked.out is None:
        raise UsageError("samples need a folder", key="out", way_out="Name one: out='samples'.")
    for key, paths in (("videos", asked.clips), ("audios", asked.sounds)):
        if paths:
            raise UsageError("a generator starts from pictures only", key=key, way_out="Leave it out.")
    if len(asked.pictures) > 1:
        raise UsageError("a video goes on from one picture", key="images", way_out="Give one.")
    settings = dict(asked.sampling)
    if asked.batch_size is not None:
        settings["batch_size"] = asked.batch_size
    known = SamplingArguments.model_fields
    refuse_unknown({name: value for name, value in settings.items() if name not in known}, asked.function, also=known)
    checked = resolved({"inference": {"sampling": settings}}).arguments.inference.sampling
    prompts = asked.prompt or ()
    if isinstance(prompts, str):
        prompts = (prompts,)
    media = {}
    if asked.pictures:
        media["image"] = asked.pictures[0]
    request = generate.GenerateRequest(
        prompts=tuple(prompts),
        media=media,
        settings={name: checked[name] for name in settings},
        lora=asked.lora,
    )
    generate.run(asked.model, asked.out, request, overwrite=asked.overwrite)
    return [asked.out / record["file"] for record in read_jsonl(asked.out / DRAWN_MANIFEST)]


def _answer_in_parts(asked: Asked) -> object:
    """The answer of a model that answers and draws to one prompt."""
    refuse_unknown(asked.sampling, asked.function, "is not an argument for a model that answers and draws")
    from mindspeed_mm.tasks.answer import unified  # torch

    if asked.rows is not None or not isinstance(asked.prompt, str):
        raise UsageError("such a model answers one prompt", key="prompt", way_out="Ask row by row.")
    given = {"out": asked.out, "videos": asked.clips, "audios": asked.sounds, "lora": asked.lora}
    for key, value in given.items():
        if value:
            raise UsageError("is not for a model that answers and draws", key=key, way_out="Use mm infer --draw.")
    request = InferRequest(
        asked.model,
        prompts=(asked.prompt,),
        images=asked.pictures,
        max_new_tokens=asked.max_new_tokens,
        config=asked.config,
    )
    return unified.answer(request)


ANSWERS: dict[ModelKind, Callable[[Asked], object]] = {LANGUAGE: _answer, GENERATOR: _draw, UNIFIED: _answer_in_parts}
"""Kind of model → what it makes of a prompt or of rows."""
