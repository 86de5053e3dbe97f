"""Draws what `mm infer` has drawn once more, from the exported folder, with nothing but diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mindspeed_mm.core.artifacts import read_jsonl
from mindspeed_mm.fsdp.data.data_utils.decoding.video import ClipSampling, read_clip

MOST_LEVELS_APART = {".png": 1, ".mp4": 8}
"""Of 255: between what is drawn and its file. PNG keeps everything, mp4 loses a little."""
MOST_PROMPTS = 20


def count_same(pipeline_folder: Path, samples: Path) -> tuple[int, int]:
    """How many of the first samples of the first prompts come out the same, and how many were drawn.

    Args:
        pipeline_folder: What `mm export` has written.
        samples: What `mm infer` has written.
    """
    entries = [entry for entry in read_jsonl(samples / "manifest.jsonl") if entry["sample"] == 0][:MOST_PROMPTS]
    drawn = draw(pipeline_folder, entries)
    same = 0
    for entry, frames in zip(entries, drawn, strict=True):
        path = samples / entry["file"]
        apart = np.abs(read_frames(path, len(frames)).astype(int) - frames).max()
        same += bool(apart <= MOST_LEVELS_APART[path.suffix])
    return same, len(entries)


def draw(pipeline_folder: Path, entries: list[dict[str, Any]]) -> np.ndarray:
    """(n, T, H, W, 3) uint8 from the prompts, seeds and settings of a manifest."""
    from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

    prepare_for_transformers()
    from diffusers import DiffusionPipeline  # these take seconds
    from diffusers.utils import logging
    from transformers.utils import logging as transformers_logging

    # diffusers takes a class of another library only when that is imported already.
    import mindspeed_mm.fsdp.models.diffusion.identity_vae  # noqa: F401

    for quiet in (logging, transformers_logging):
        quiet.set_verbosity_error()
        quiet.disable_progress_bar()
    pipeline = DiffusionPipeline.from_pretrained(pipeline_folder)
    pipeline.set_progress_bar_config(disable=True)
    # Some pipelines take one picture.
    groups = [[entry] for entry in entries] if entries[0]["image"] else [entries]
    frames = np.concatenate([(draw_together(pipeline, group) * 255).round().astype(np.uint8) for group in groups])
    return frames if frames.ndim == 5 else frames[:, None]


def draw_together(pipeline: Any, entries: list[dict[str, Any]]) -> np.ndarray:
    """(n, T, H, W, 3), of pictures (n, H, W, 3), in 0..1: of prompts that share a picture, or have none."""
    arguments = arguments_of(pipeline, entries[0]["settings"])
    if entries[0]["image"]:
        arguments["image"] = Image.open(entries[0]["image"]).convert("RGB")
    media = pipeline(
        prompt=[entry["prompt"] for entry in entries],
        negative_prompt=[entry["negative_prompt"] for entry in entries],
        generator=[torch_generator(entry["noise_seed"]) for entry in entries],
        output_type="np",
        **arguments,
    )[0]
    return np.asarray(media)


def torch_generator(seed: int) -> Any:
    """What draws the noise of a sample."""
    import torch  # seconds

    return torch.Generator().manual_seed(seed)


def arguments_of(pipeline: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """The pipeline's names for the settings of a manifest."""
    same = {name: settings[name] for name in ("height", "width", "num_inference_steps")}
    if type(pipeline).__name__.startswith("Flux"):
        length = pipeline.tokenizer_2.model_max_length
        if "Kontext" in type(pipeline).__name__:  # it would choose sizes of its own
            same |= {"max_area": same["height"] * same["width"], "_auto_resize": False}
        return same | {
            "true_cfg_scale": settings["guidance_scale"],
            "max_sequence_length": length,
            "return_dict": False,
        }
    return same | {
        "guidance_scale": settings["guidance_scale"],
        "max_sequence_length": pipeline.tokenizer.model_max_length,
        "num_frames": settings["num_frames"] - 1,  # with a VAE that keeps every frame, the pipeline adds one
        "return_dict": False,
    }


def read_frames(path: Path, count: int) -> np.ndarray:
    """(T, H, W, 3) uint8 of a PNG or an mp4."""
    if path.suffix == ".png":
        return np.asarray(Image.open(path).convert("RGB"))[None]
    with path.open("rb") as file:
        return read_clip(file, count, ClipSampling(), lambda image: np.asarray(image), path.name).transpose(1, 2, 3, 0)
