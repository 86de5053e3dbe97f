"""The generators' examples of learning from rewards: configurations hold; in a long run the judge that is not the
reward sees far more digits than before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_mm.fsdp.params.loader import load_config

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "digits_flux_grpo"
METHODS = ("grpo", "nft")


@pytest.mark.parametrize("method", METHODS)
def test_the_configurations_hold(method: str) -> None:
    config = load_config(EXAMPLE / f"digits_flux_{method}_config.yaml")
    assert config.warnings == ()
    assert config.arguments.posttrain.method == method
    assert [reward.weight for reward in config.arguments.posttrain.rewards] == [1, 0]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits_flux_grpo")
    subprocess.run([sys.executable, str(EXAMPLE / "make_start.py"), str(folder)], cwd=ROOT, check=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_rewards_teach_what_the_judge_sees(method: str, start: Path, tmp_path: Path) -> None:
    """Half of what was measured: the judge's share rises by 0.1, and samples of a prompt still differ."""
    words = [
        f"model.model_name_or_path={start / 'start'}",
        f"data.dataset_param.basic_parameters.dataset={start / 'prompts.txt'}",
        f"training.save={tmp_path / 'run'}",
    ]
    config = EXAMPLE / f"digits_flux_{method}_config.yaml"
    subprocess.run([sys.executable, "-m", "mindspeed_mm", "train", str(config), *words], cwd=ROOT, check=True)
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    judged = [line["reward/digit_judge"] for line in logged if "reward" in line]
    assert judged[-1] > judged[0] + 0.1
    assert 10 < logged[-1]["diversity"] < logged[0]["diversity"]
