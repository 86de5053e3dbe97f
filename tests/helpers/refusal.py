"""Rows of a table of refusals: configurations that do not train, and the runs that they spoil."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_media_pairs import make_tiny_media_pairs
from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_moe
from tests.helpers.tiny_pairs import make_tiny_pairs
from tests.helpers.tiny_run import make_rows, make_tiny_run

BASIC = "data.dataset_param.basic_parameters"
PREPROCESS = "data.dataset_param.preprocess_parameters"
LOADER = "data.dataloader_param"
MODEL = "model.model_name_or_path"
LORA = ("training.lora.enable=true",)

USAGE, ENVIRONMENT, DATA = 2, 3, 4


@dataclass(frozen=True)
class Refusal:
    """A configuration that does not train."""

    name: str
    """What is wrong."""
    words: tuple[str, ...]
    """Overrides of the run; `{folder}` is where it lies."""
    said: str
    """Part of the message."""
    key: str = ""
    code: int = USAGE
    spoil: Callable[[Path], Any] | None = None
    """Changes the run's folder first: `model/`, `rows.jsonl`, `images/`."""
    by_data_check: bool = False
    """Whether `mm data check` finds it, too: it has to do with the rows alone."""
    ranks: int = 1
    """Of the run."""
    base: str = "vision"
    """Name of the run that is spoiled, see `make_base`."""


def make_base(folder: Path, name: str) -> Path:
    """A run that trains; returns its YAML.

    Args:
        folder: Where to; made.
        name: `vision` (a Qwen3-VL), `text` (a Qwen3), `moe` (a Qwen3-MoE), `flux`, `t2v` or `i2v` (a Wan); `pairs` and
            `answers`, a Qwen3 that is trained on preference pairs and on its own answers; `media pairs`, a FLUX whose
            rows are such pairs.
    """
    if name in ("flux", "t2v", "i2v"):
        return make_tiny_generator_run(folder, name)
    if name == "media pairs":
        return make_tiny_media_pairs(folder)
    if name in _OF_TEXT:
        _OF_TEXT[name](folder / "model")
        make_rows(folder, images=(0,))
    if name == "pairs":
        return make_tiny_pairs(folder, images=(0,))
    return make_tiny_run(folder, **(_ANSWERS if name == "answers" else {}))


_OF_TEXT = {
    "text": make_tiny_qwen3,
    "moe": make_tiny_qwen3_moe,
    "pairs": make_tiny_qwen3,
    "answers": make_tiny_qwen3,
}
_ANSWERS: dict[str, Any] = {
    "posttrain": {
        "method": "grpo",
        "grpo": {"num_generations": 2},
        "rollout": {"max_completion_length": 4},
        "rewards": [{"name": "json"}],
    }
}


def spoiled(base: Path, folder: Path, row: Refusal) -> Path:
    """The YAML of a copy of the run, spoiled as the row says."""
    shutil.copytree(base, folder)
    text = (folder / "run.yaml").read_text().replace(str(base), str(folder))
    (folder / "run.yaml").write_text(text)
    if row.spoil is not None:
        row.spoil(folder)
    return folder / "run.yaml"


def with_config(**changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "model" / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | changes))

    return spoil


def with_weights(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "model" / "model.safetensors"
        weights = load_file(path)
        change(weights)
        save_file(weights, path, metadata={"format": "pt"})

    return spoil


def with_first_row(**changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "rows.jsonl"
        first, *others = path.read_text().splitlines()
        path.write_text("\n".join([json.dumps(json.loads(first) | changes), *others]) + "\n")

    return spoil


def with_file(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text)


def without_file(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def with_more_tokens(folder: Path) -> None:
    """A tokenizer with tokens that the model's embedding has no rows for."""
    path = folder / "model" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    first = 1 + max(tokenizer["model"]["vocab"].values())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": first + n, "content": f"<|new_{n}|>", **plain} for n in range(8)]
    path.write_text(json.dumps(tokenizer))


def with_a_text_model(folder: Path) -> None:
    """A text model beside rows with pictures."""
    shutil.rmtree(folder / "model")
    make_tiny_qwen3(folder / "model")
