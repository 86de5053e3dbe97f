from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm.fsdp.params.data_args import DatasetParam
from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_vl


@pytest.fixture(scope="session")
def vlm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_vl(tmp_path_factory.mktemp("vlm"))


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def processor(vlm_folder: Path) -> Any:
    from mindspeed_mm.fsdp.utils.processor import load_processor

    return load_processor(vlm_folder)


@pytest.fixture(scope="session")
def tokenizer(text_folder: Path) -> Any:
    from mindspeed_mm.fsdp.utils.processor import load_processor

    return load_processor(text_folder)


def picture(width: int = 32, height: int = 32, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def conversation(question: str = "<image>Which digit is this?", answer: str = "seven", **row: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **row}


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def make_rows(tmp_path: Path) -> Callable[..., Path]:
    """Rows with an image, every third without; answers of uneven length."""

    def make(count: int = 12) -> Path:
        rows = []
        for i in range(count):
            answer = "seven " * (1 + i % 4)
            if i % 3 == 2:
                rows.append(conversation(f"What comes after {i}?", answer))
                continue
            picture(32 + 16 * (i % 2), 32, seed=i).save(tmp_path / f"{i}.png")
            rows.append(conversation(answer=answer, images=[f"{i}.png"]))
        return write_jsonl(tmp_path / "rows.jsonl", rows)

    return make


@pytest.fixture
def param(tmp_path: Path, vlm_folder: Path) -> Callable[..., DatasetParam]:
    def make(dataset: Any, model: Path = vlm_folder, attr: dict[str, Any] | None = None, **basic: Any) -> DatasetParam:
        files = [str(part) for part in dataset] if isinstance(dataset, list) else str(dataset)
        return DatasetParam.model_validate(
            {
                "attr": attr or {},
                "basic_parameters": {"dataset": files, "dataset_dir": str(tmp_path), **basic},
                "preprocess_parameters": {"model_name_or_path": str(model)},
            }
        )

    return make
