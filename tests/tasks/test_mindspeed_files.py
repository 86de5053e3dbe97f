"""Files with the keys, module names and kernels of MindSpeed-MM's own train as they stand; only paths and sizes change.

The files were written for NPUs: what a CPU cannot run gives way to what computes the same.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.mindspeed_files import paths_and_sizes
from tests.helpers.runs import mm

FILES = Path(__file__).parents[1] / "fsdp" / "params" / "files"
QUICK = ("qwen3_5_moe", "kimi_k25", "cosyvoice3")
OTHERS = ("qwen3_5", "qwen3_vl", "qwen3_omni", "qwen3_asr", "minimax_m3_vl", "qwen3tts", "funasr", "qwen3_5_moe_older")


def train_two_steps(name: str, folder: Path) -> None:
    file = FILES / f"{name}.yaml"
    said = mm("train", file, *paths_and_sizes(name.removesuffix("_older"), folder, file))
    assert said.code == 0, said.err
    lines = [json.loads(line) for line in (folder / "save" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 2
    assert losses[0] != losses[1]


@pytest.mark.parametrize("name", QUICK)
def test_a_file_trains_two_steps(name: str, tmp_path: Path) -> None:
    train_two_steps(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_further_files_train_two_steps(name: str, tmp_path: Path) -> None:
    train_two_steps(name, tmp_path)
