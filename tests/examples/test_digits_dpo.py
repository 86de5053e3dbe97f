"""The example of preferences learns what its README says, with half the margin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
UNTRAINED = ["training.lr=1e-12", "training.train_iters=1", "training.val_interval=1"]
"""A run that measures the start."""


def validated(folder: Path) -> dict[str, float]:
    """What the last validation of a run measured."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "val_loss" in line][-1]


@pytest.mark.slow
def test_right_answers_become_more_probable_with_pref_ftx_alone(tmp_path: Path) -> None:
    mm = [sys.executable, "-m", "mindspeed_mm"]
    supervised = "runs/digits_dpo/supervised"
    config = str(EXAMPLES / "digits_dpo/digits_dpo_config.yaml")
    commands = [
        [sys.executable, str(EXAMPLES / "digits/make_digits.py"), "runs/digits"],
        [sys.executable, str(EXAMPLES / "digits_dpo/make_pairs.py"), "runs/digits", "runs/digits_dpo"],
        [
            *mm,
            "train",
            str(EXAMPLES / "digits/digits_tiny_config.yaml"),
            "--steps",
            "400",
            f"training.save={supervised}",
        ],
        [*mm, "export", supervised, "runs/digits_dpo/start"],
        [*mm, "train", config, *UNTRAINED, "training.save=runs/digits_dpo/untrained"],
        [*mm, "train", config],
        [*mm, "train", config, "posttrain.dpo.pref_ftx=0", "training.save=runs/digits_dpo/without"],
    ]
    paths = [str(EXAMPLES.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    for command in commands:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-2000:]
    runs = tmp_path / "runs/digits_dpo"
    start, with_it, without = (validated(runs / name) for name in ("untrained", "run", "without"))
    right = start["val_logps/chosen"]
    assert with_it["val_logps/chosen"] > right + 0.12 and without["val_logps/chosen"] < right - 0.25
    for found in (with_it, without):
        assert found["val_rewards/accuracies"] > 0.68 and found["val_rewards/margins"] > 0.08
