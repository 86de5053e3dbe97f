"""Models that a caller in Python names, and what they are asked: prompts, pictures, rows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_mm.core.artifacts import read_jsonl
from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.tasks.given.arguments import refuse_unknown
from mindspeed_mm.tasks.given.configuration import resolved
from mindspeed_mm.tasks.given.rows import is_picture, listed_rows, named_path, picture_bytes, with_ids, write_rows
from mindspeed_mm.tasks.given.run_view import Run


def model_path(model: Any) -> Path:
    """A run's folder, or the path itself."""
    try:
        return named_path(os.fspath(model), "model")
    except TypeError as error:
        raise UsageError(
            "this run kept nothing" if isinstance(model, Run) else f"{type(model).__name__} is not a run and no path",
            key="model",
            way_out="Set training.save to keep checkpoints, or name a folder; the model that was trained is run.model.",
        ) from error


def is_in_memory(rows: Any) -> bool:
    """Whether rows are objects, and not a file."""
    return not (rows is None or isinstance(rows, str | os.PathLike))


def question_file(rows: Any, folder: Path) -> Path:
    """The file of rows; those in memory are stored in `folder`."""
    if not is_in_memory(rows):
        return named_path(rows, "rows")
    return write_rows(with_ids(listed_rows(rows, "question")), folder, "questions", stores_media=False)


def picture_files(images: Any, folder: Path) -> tuple[Path, ...]:
    """The files of pictures; those in memory are stored in `folder`."""
    listed = images if isinstance(images, list | tuple) else [images]
    return tuple(_picture(image, folder, number) for number, image in enumerate(listed))


def _picture(image: Any, folder: Path, number: int) -> Path:
    if isinstance(image, str | os.PathLike):
        return named_path(image, "images")
    if not is_picture(image):
        raise UsageError(f"{type(image).__name__} is not a picture", key="images", way_out="Give paths or PIL images.")
    path = folder / f"{number}.png"
    path.write_bytes(picture_bytes(image))
    return path


def answer(
    model: Path,
    prompt: Any,
    pictures: tuple[Path, ...],
    rows: Any,
    out: Path | None,
    folder: Path,
    *,
    max_new_tokens: int,
    batch_size: int | None,
    lora: Path | None,
    config: Path | None,
    overwrite: bool,
) -> Any:
    """Answers of a language model, to a prompt or to rows; `folder` is for what lives as long as the call."""
    from mindspeed_mm.tasks.answer import infer as task  # torch

    if (prompt is None) == (rows is None):
        raise UsageError("give either a prompt or rows", key="prompt")
    if prompt is not None:
        if not isinstance(prompt, str):
            raise UsageError("a language model answers one prompt", key="prompt", way_out="Give rows for several.")
        return task.answer_prompt(model, prompt, pictures, max_new_tokens=max_new_tokens, lora=lora, config=config)
    answers = out or folder / "answers.jsonl"
    task.run(
        model,
        question_file(rows, folder),
        answers,
        batch_size=batch_size or 32,
        max_new_tokens=max_new_tokens,
        media_dir=Path.cwd() if is_in_memory(rows) else None,
        overwrite=overwrite,
        lora=lora,
        config=config,
    )
    return read_jsonl(answers)


def draw(
    model: Path,
    prompt: str | Sequence[str] | None,
    pictures: tuple[Path, ...],
    out: Path | None,
    settings: Mapping[str, Any],
    function: Any,
    *,
    lora: Path | None,
    overwrite: bool,
) -> list[Path]:
    """Samples of a generator; returns their files in the order of the prompts.

    Args:
        model: A folder.
        prompt: What to draw.
        pictures: At most one, that a video goes on from.
        out: The folder of the samples.
        settings: Of the sampler, by the names of `inference.sampling`.
        function: Whose arguments the settings are, for messages.
        lora: Folder of adapters.
        overwrite: Forget what `out` holds.
    """
    from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments  # pydantic
    from mindspeed_mm.tasks.draw import generate  # torch

    if out is None:
        raise UsageError("samples need a folder", key="out", way_out="Name one: out='samples'.")
    if len(pictures) > 1:
        raise UsageError("a video goes on from one picture", key="images", way_out="Give one.")
    known = SamplingArguments.model_fields
    refuse_unknown({name: value for name, value in settings.items() if name not in known}, function, also=known)
    checked = resolved({"inference": {"sampling": settings}}).arguments.inference.sampling
    request = generate.GenerateRequest(
        prompts=(prompt,) if isinstance(prompt, str) else tuple(prompt or ()),
        image=next(iter(pictures), None),
        settings={name: getattr(checked, name) for name in settings},
        lora=lora,
    )
    generate.run(model, out, request, overwrite=overwrite)
    return [out / record["file"] for record in read_jsonl(out / "manifest.jsonl")]
