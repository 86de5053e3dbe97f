"""A run small enough for tests: a model folder, image conversations with uneven images and answers, and one YAML."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.helpers.made_once import made_once
from tests.helpers.tiny_models import make_tiny_qwen3_vl

STEADY: dict[str, Any] = {"lr_decay_style": "constant", "lr_warmup_ratio": 0.0, "save_total_limit": None}
"""One learning rate for all steps and every checkpoint kept: what a few steps are compared by."""
WORDS = ("red", "green", "blue", "large", "small", "round", "flat", "old", "new", "far")


@made_once
def make_rows(folder: Path, count: int = 24, seed: int = 0, images: Sequence[int] = (1, 0, 2)) -> Path:
    """`count` conversations with as many images as `images` says in turn, and answers of 1 to 9 words; returns the
    JSONL."""
    from PIL import Image

    draw = random.Random(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for index in range(count):
        names = []
        for image in range(images[index % len(images)]):
            name = f"images/{index}_{image}.png"
            pixels = bytes(draw.randrange(256) for _ in range(32 * 32 * 3))
            Image.frombytes("RGB", (32, 32), pixels).save(folder / name)
            names.append(name)
        question = "<image>" * len(names) + "What is it like?"
        answer = " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 9)))
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"id": f"row{index}", "messages": messages, "images": names})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def tiny_config(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """The YAML's content; `sections` are merged into it, one level deep."""
    config: dict[str, Any] = {
        "model": {"model_name_or_path": str(folder / "model")},
        "data": {
            "dataset_param": {
                "dataset_type": "huggingface",
                "attr": {
                    "formatting": "sharegpt", "messages": "messages", "images": "images", "role_tag": "role",
                    "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
                },
                "basic_parameters": {"dataset": str(folder / "rows.jsonl"), "dataset_dir": str(folder)},
            },
            "dataloader_param": {"num_workers": 0, "shuffle": True},
        },
        "parallel": {},
        "training": {"lr": 1e-3, "micro_batch_size": 2, "train_iters": 6, "log_interval": 1, "seed": 7, **STEADY},
    }  # fmt: skip
    for name, content in sections.items():
        config.setdefault(name, {}).update(content)
    return config


def make_tiny_run(folder: Path, **sections: dict[str, Any]) -> Path:
    """Write model, data and `run.yaml` into `folder`; returns the YAML's path."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        make_tiny_qwen3_vl(folder / "model")
    if not (folder / "rows.jsonl").exists():
        make_rows(folder)
    path = folder / "run.yaml"
    with path.open("w", encoding="utf-8") as file:
        YAML().dump(tiny_config(folder, **sections), file)
    return path
