"""A generator's run small enough for tests: a model folder, captioned pictures or clips, and one YAML."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from ruamel.yaml import YAML

from tests.helpers.tiny_generators import make_tiny_flux, make_tiny_wan
from tests.helpers.tiny_run import STEADY

THINGS = ("a red box", "two blue lines", "a seven moving left", "", "grain, large and round")


def make_pictures(
    folder: Path, count: int = 16, sizes: tuple[tuple[int, int], ...] = ((16, 16),), seed: int = 0
) -> Path:
    """`count` PNG pictures of the given (height, width) in turn, some with two captions; returns the JSONL."""
    draw = random.Random(seed)
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rows = []
    for index in range(count):
        height, width = sizes[index % len(sizes)]
        name = f"pictures/{index}.png"
        pixels = np.frombuffer(draw.randbytes(height * width * 3), dtype=np.uint8).reshape(height, width, 3)
        Image.fromarray(pixels).save(folder / name)
        caption = draw.choice(THINGS)
        rows.append({"path": name, "cap": [caption, f"{caption} again"] if index % 3 == 0 else caption})
    return _write_rows(folder, rows)


def make_clips(folder: Path, count: int = 16, frames: int = 5, size: int = 16, seed: int = 0) -> Path:
    """`count` animated GIFs, whose pixels come back as they were; returns the JSONL."""
    draw = random.Random(seed)
    (folder / "clips").mkdir(parents=True, exist_ok=True)
    rows = []
    for index in range(count):
        name = f"clips/{index}.gif"
        grays = np.frombuffer(draw.randbytes(frames * size * size), dtype=np.uint8).reshape(frames, size, size)
        first, *others = [Image.fromarray(gray) for gray in grays]
        first.save(folder / name, save_all=True, append_images=others, duration=125, loop=0)
        rows.append({"path": name, "cap": draw.choice(THINGS)})
    return _write_rows(folder, rows)


def _write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def generator_config(folder: Path, preprocess: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    """The YAML's content; `sections` are merged into it, one level deep. Of clips every frame is taken, whatever their
    rate."""
    if "num_frames" in preprocess and "fps" not in preprocess:
        preprocess = {"frame_interval": 1, **preprocess}
    basic = {"dataset": str(folder / "rows.jsonl"), "dataset_dir": str(folder)}
    config: dict[str, Any] = {
        "model": {"model_name_or_path": str(folder / "model")},
        "data": {
            "dataset_param": {
                "dataset_type": "generation", "basic_parameters": basic, "preprocess_parameters": preprocess,
            },
            "dataloader_param": {"num_workers": 0},
        },
        "parallel": {},
        "training": {
            "lr": 1e-3, "micro_batch_size": 2, "train_iters": 6, "log_interval": 1, "seed": 7,
            "diffusion": {"caption_dropout": 0.25}, **STEADY,
        },
    }  # fmt: skip
    for name, content in sections.items():
        config.setdefault(name, {}).update(content)
    return config


def make_tiny_generator_run(folder: Path, family: str = "flux", side: int = 16, **sections: dict[str, Any]) -> Path:
    """Write model, data and `run.yaml` of a FLUX (`flux`) or Wan (`t2v`, `i2v`) run into `folder`; returns the YAML.

    Media are squares of `side` pixels: 16 are 16 tokens of FLUX and 2 of Wan, 32 are 8 of Wan.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        make_tiny_flux(folder / "model") if family == "flux" else make_tiny_wan(folder / "model", task=family)
    if not (folder / "rows.jsonl").exists():
        make_pictures(folder, sizes=((side, side),)) if family == "flux" else make_clips(folder, size=side)
    sizes = {"height": side, "width": side, **({} if family == "flux" else {"num_frames": 5})}
    path = folder / "run.yaml"
    with path.open("w", encoding="utf-8") as file:
        YAML().dump(generator_config(folder, sizes, **sections), file)
    return path
