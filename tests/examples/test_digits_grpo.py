"""The example of rewards: its rows are the reading rows, its YAML passes every rule, and its commands teach reading."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_mm.fsdp.params.loader import load_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits_grpo"


def test_prompts_are_the_reading_rows(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_prompts", EXAMPLE / "make_prompts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = [{"id": f"{task}-{n}", "task": task} for n in range(3) for task in ("naming", "reading")]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert module.make_prompts(tmp_path) == {"reading_train.jsonl": 3, "reading_test.jsonl": 3}
    kept = [json.loads(line) for line in (tmp_path / "reading_train.jsonl").read_text().splitlines()]
    assert {row["task"] for row in kept} == {"reading"}


def test_the_yaml_is_a_run() -> None:
    arguments = load_config(EXAMPLE / "digits_grpo_config.yaml").arguments
    assert arguments.posttrain.method == "grpo"
    assert arguments.training.micro_batch_size == 24 * arguments.posttrain.grpo.num_generations


@pytest.mark.slow
def test_its_commands_teach_reading(tmp_path: Path) -> None:
    """Half of what the README measured: 25 to 71 %."""
    (tmp_path / "examples").symlink_to(EXAMPLE.parent)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "mm").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mindspeed_mm "$@"\n')
    (bin_folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for tool in bin_folder.iterdir():
        tool.chmod(0o755)
    paths = {
        "PATH": os.pathsep.join([str(bin_folder), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(EXAMPLE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
    }
    command = ["bash", "examples/digits_grpo/train_digits_grpo.sh"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | paths, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-2000:]
    before, after = (
        json.loads((tmp_path / "runs/digits_grpo" / name / "results.json").read_text())["tasks"]["reading"]["accuracy"]
        for name in ("before", "after")
    )
    assert before < 0.35
    assert after > before + 0.22
