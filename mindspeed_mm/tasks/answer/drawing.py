"""`mm infer --draw`: an answer that is a picture, by a model that draws with codes (Janus-Pro)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.core.artifacts import atomic_write_bytes, make_writable_folder
from mindspeed_mm.core.errors import DataError, UsageError
from mindspeed_mm.core.file_writing import check_medium_file
from mindspeed_mm.fsdp.sampling.answers.generator import Generator, move_to
from mindspeed_mm.fsdp.sampling.answers.picture_codes import can_draw, choice_of, draw_codes, pixels_of
from mindspeed_mm.fsdp.sampling.answers.questions import ask
from mindspeed_mm.fsdp.utils.media_files import image_bytes
from mindspeed_mm.fsdp.utils.model_parts import attribute_at
from mindspeed_mm.tasks.answer.generation import load_generator
from mindspeed_mm.tasks.answer.infer import media_items
from mindspeed_mm.tasks.answer.view import rows_view
from mindspeed_mm.tasks.model_source import resolve_model, with_adapters
from mindspeed_mm.tasks.requests.infer import InferRequest


@dataclass(frozen=True)
class DrawnPicture:
    """A picture that was drawn."""

    file: Path
    width: int
    height: int
    codes: int
    """How many the model chose."""


def run(request: InferRequest) -> DrawnPicture:
    """Draw what the one prompt of a request asks for, into the PNG file that it names.

    Raises:
        MMError: The model does not draw, a picture of the prompt cannot be read, or the file cannot be written.
    """
    assert request.draw is not None
    choice = choice_of(
        guidance=request.guidance_scale,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        seed=request.seed,
    )
    out = check_medium_file(request.draw, "PNG", [path for _, path in request.media], "--draw")
    source = with_adapters(resolve_model(request.model), request.lora)
    generator = load_generator(source.folder, source.lora, rows_view(source, request.config).of_people())
    unwrap = attribute_at(generator.model, "get_base_model")  # of PEFT, which has put adapters into its layers
    model: Any = generator.model if unwrap is None else unwrap()
    if not can_draw(model):
        way_out = "Pictures are drawn by folders of Janus-Pro and by generators; leave it out for others."
        raise UsageError("the model does not draw", where=str(source.folder), key="--draw", way_out=way_out)
    prompt = _prompt(generator, request, model.config.vision_config.num_image_tokens)
    with torch.inference_mode():
        codes = draw_codes(model, prompt, choice, generator.tokenizer.pad_token_id)
        (pixels,) = pixels_of(model, codes).cpu().numpy()
    make_writable_folder(out.parent)
    atomic_write_bytes(out, image_bytes(pixels))
    height, width, _ = pixels.shape
    return DrawnPicture(request.draw, width, height, codes.shape[1])


def _prompt(generator: Generator, request: InferRequest, codes: int) -> dict[str, torch.Tensor]:
    """The question as training shows it, with the mark that begins a picture at its end.

    Raises:
        DataError: It leaves no room for so many codes.
    """
    media = media_items(request)
    loader = generator.encoder.media(Path.cwd(), [Path(item.source).parent for item in media])
    question = generator.encode(ask(request.prompt, media).sample, loader)
    inputs = move_to(generator.encoder.collate([question]), generator.model.device)
    begin = attribute_at(generator.encoder.processor, "image_start_token")
    mark = torch.tensor([[generator.tokenizer.convert_tokens_to_ids(begin)]], device=generator.model.device)
    longest, needed = generator.longest, inputs["input_ids"].shape[1] + 1 + codes
    if longest is not None and needed > longest:
        what = f"the prompt and the picture have {needed:,} tokens, and the model takes {longest:,}"
        raise DataError(what, key="--prompt", way_out="Say it in fewer words, or show fewer pictures.")
    return inputs | {"input_ids": torch.cat([inputs["input_ids"], mark], dim=1)}
