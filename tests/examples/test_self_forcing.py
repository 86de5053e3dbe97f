"""The examples of distillation: configurations hold; in a long run the student of four steps keeps the teacher's score
and is many times as fast."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_mm.fsdp.params.loader import load_config

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "self_forcing"


@pytest.mark.parametrize(("name", "blocks"), [("self_forcing_1.3B", 3), ("moving_digits_dmd", None)])
def test_the_configurations_hold(name: str, blocks: int | None) -> None:
    config = load_config(EXAMPLE / f"{name}_config.yaml")
    assert config.warnings == ()
    posttrain = config.arguments.posttrain
    assert posttrain.method == "dmd" and posttrain.dmd.num_frame_per_block == blocks
    assert posttrain.dmd.denoising_step_list == (1000, 750, 500, 250)


@pytest.mark.slow
def test_a_student_keeps_what_its_teacher_draws(tmp_path: Path) -> None:
    """At least 90 % of the teacher's score, and 5 times as fast at equal batch: `judge_student.py` says so."""

    def run(*words: object) -> None:
        subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=True)

    run("examples/quickstart_generation.py", "moving_digits_wan", "--runs", tmp_path)
    teacher, student = tmp_path / "moving_digits_wan", tmp_path / "student"
    basic = "data.dataset_param.basic_parameters"
    run(
        *("-m", "mindspeed_mm", "train", EXAMPLE / "moving_digits_dmd_config.yaml"),
        f"model.model_name_or_path={teacher / 'pipeline'}",
        f"{basic}.dataset={teacher / 'data' / 'train.jsonl'}",
        f"{basic}.dataset_dir={teacher / 'data'}",
        f"{basic}.features_dir={teacher / 'features'}",
        f"training.save={tmp_path / 'run'}",
    )
    run("-m", "mindspeed_mm", "export", tmp_path / "run", student)
    run(EXAMPLE / "judge_student.py", student, teacher / "pipeline")
