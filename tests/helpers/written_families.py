"""What tests of families that are built here have in common: the model of a folder, and pictures to ask it about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.model_args import ModelArguments


def loaded(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    """The model of a folder, by this package."""
    arguments = ModelArguments(model_name_or_path=str(folder))
    model = ModelHub.build(arguments, param_dtype=dtype)
    ModelHub.load_weights(model, arguments, seed=0, device=torch.device("cpu"))
    return model.eval()


def random_pictures(sizes: Sequence[tuple[int, int]]) -> list[Image.Image]:
    """Pictures of random pixels, each of its (width, height)."""
    draw = torch.Generator().manual_seed(1)
    return [
        Image.frombytes("RGB", size, bytes(torch.randint(256, (size[0] * size[1] * 3,), generator=draw).tolist()))
        for size in sizes
    ]
