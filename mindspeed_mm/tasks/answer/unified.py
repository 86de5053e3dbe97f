"""`mm infer` of a model that answers in words and draws by denoising: one prompt, with pictures in front of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps

from mindspeed_mm.core.artifacts import atomic_write_bytes, make_writable_folder
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.file_writing import check_medium_file
from mindspeed_mm.fsdp.params.data_args import PreprocessParameters
from mindspeed_mm.fsdp.sampling.unified import Drawing, Words, load_unified
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.media_files import image_bytes
from mindspeed_mm.fsdp.utils.own_families import model_type_of
from mindspeed_mm.tasks.model_source import ModelSource, resolve_model, run_arguments
from mindspeed_mm.tasks.requests.infer import InferRequest
from mindspeed_mm.tasks.requests.shared import height_and_width


@dataclass(frozen=True)
class SaidInParts:
    """An answer in words, to be printed or shown as JSON."""

    text: str
    finished: bool
    """Whether it came to an end before the longest length."""


@dataclass(frozen=True)
class DrawnInParts:
    """An answer that is a picture."""

    file: Path
    width: int
    height: int
    steps: int


def answer(request: InferRequest) -> SaidInParts:
    """What the model says to the prompt of a request.

    Raises:
        MMError: The folder is not a model, or a picture cannot be read.
    """
    with torch.inference_mode():
        sampler, context, _ = _opened_sequence(request, draws=False)
        return SaidInParts(*sampler.answer(context, words_for(request, request.seed or 0)))


def draw(request: InferRequest) -> DrawnInParts:
    """Draw what the prompt of a request asks for, into the PNG file that it names.

    Raises:
        MMError: The folder is not a model, a picture or a size cannot be used, or the file cannot be written.
    """
    assert request.draw is not None
    out = check_medium_file(request.draw, "PNG", [path for _, path in request.media], "--draw")
    with torch.inference_mode():
        sampler, context, size = _opened_sequence(request, draws=True)
        drawing = drawing_for(request, sampler.defaults, size, request.seed or 0)
        pixels = sampler.draw(context, drawing).permute(1, 2, 0).numpy()
    make_writable_folder(out.parent)
    atomic_write_bytes(out, image_bytes(pixels))
    return DrawnInParts(request.draw, drawing.width, drawing.height, drawing.steps)


def words_for(request: InferRequest, seed: int) -> Words:
    """How the words of an answer are chosen."""
    return Words(request.longest_answer, request.temperature or 0.0, seed)


def drawing_for(request: InferRequest, usual: Drawing, size: tuple[int, int] | None, seed: int) -> Drawing:
    """How a picture is drawn: of the size that is asked for, or of that of the last picture in front.

    Args:
        request: What is asked.
        usual: How the model draws where nothing is asked.
        size: Height and width of that picture; None: there is none.
        seed: Of its noise.

    Raises:
        UsageError: The size that is asked for is none.
    """
    if request.size is not None:
        size = height_and_width(request.size, "--size")
    height, width = size or (usual.height, usual.width)
    return replace(
        usual,
        height=height,
        width=width,
        steps=request.num_inference_steps or usual.steps,
        text_guidance=_or(request.guidance_scale, usual.text_guidance),
        picture_guidance=_or(request.picture_guidance, usual.picture_guidance),
        seed=seed,
    )


def _or(given: float | None, default: float) -> float:
    if given is None:
        return default
    return given


def sampler_of(request: InferRequest, source: ModelSource) -> Any:
    """What answers and draws with a model, with pictures as large as the run says that was trained.

    Raises:
        MMError: The folder is not a model.
    """
    preprocess = _sizes(request, source.run)
    if model_type_of(source.folder) == "internvlu":
        from mindspeed_mm.fsdp.sampling.internvlu import load_internvlu

        return load_internvlu(source.folder, preprocess, current_device())
    return load_unified(source.folder, preprocess, current_device())


def _opened_sequence(request: InferRequest, *, draws: bool) -> tuple[Any, Any, tuple[int, int] | None]:
    """The model and the sequence up to its answer; with pictures the size of the last one."""
    sampler = sampler_of(request, resolve_model(request.model))
    context, size = sampler.start(), None
    for path in request.images:
        size = sampler.add_picture(context, _opened(path), given=draws)
    sampler.add_text(context, request.prompt)
    return sampler, context, size


def _sizes(request: InferRequest, run: Path | None) -> PreprocessParameters:
    """How large pictures are, as the run says that was trained."""
    arguments = load_with_plugins(request.config).arguments if request.config is not None else run_arguments(run)
    if arguments is None:
        return PreprocessParameters()
    return arguments.data.dataset_param.preprocess_parameters


def _opened(path: Path) -> Image.Image:
    try:
        with Image.open(path) as picture:
            return ImageOps.exif_transpose(picture).convert("RGB")
    except (OSError, ValueError) as error:
        raise DataError(f"is no picture: {error}", where=str(path), key="--image") from error
