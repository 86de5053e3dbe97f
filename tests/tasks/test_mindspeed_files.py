"""Files with the keys, module names and kernels of MindSpeed-MM's own train as they stand; only paths and sizes change.

The files were written for NPUs: what a CPU cannot run gives way to what computes the same.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.mindspeed_files import make_folder, make_rows_of
from tests.helpers.runs import mm

FILES = Path(__file__).parents[1] / "fsdp" / "params" / "files"
QUICK = ("qwen3_5_moe", "kimi_k25")
OTHERS = ("qwen3_5", "qwen3_vl", "qwen3_omni", "qwen3_asr", "minimax_m3_vl", "qwen3tts")
ROWS_THEMSELVES = ("qwen3tts",)
"""Their `dataset_dir` is the file of rows."""
ROWS = "data.dataset_param.basic_parameters"


def paths_and_sizes(name: str, folder: Path) -> list[str]:
    """All that is changed."""
    model, rows = make_folder(name, folder / "model"), make_rows_of(name, folder)
    changes = {
        "model.model_name_or_path": model,
        "data.dataset_param.preprocess_parameters.model_name_or_path": model,
        f"{ROWS}.dataset": rows,
        f"{ROWS}.dataset_dir": rows if name in ROWS_THEMSELVES else folder,
        f"{ROWS}.cache_dir": folder / "cache",
        f"{ROWS}.preprocessing_num_workers": 1,
        "data.dataloader_param.num_workers": 0,
        "training.train_iters": 2,
        "training.lr_warmup_ratio": 0,
        "training.load": "null",
        "training.save": folder / "save",
        "training.save_interval": 2,
    }
    if name == "qwen3_5_moe":
        changes |= {f"data.val_dataset_param.basic_parameters.{key}": path for key, path in (
            ("dataset", rows), ("dataset_dir", folder), ("cache_dir", folder / "cache_val")
        )}  # fmt: skip
        changes["data.val_dataset_param.preprocess_parameters.model_name_or_path"] = model
    return [f"{key}={value}" for key, value in changes.items()]


def train_two_steps(name: str, folder: Path) -> None:
    said = mm("train", FILES / f"{name}.yaml", *paths_and_sizes(name, folder))
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
