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


def run(*words: object) -> None:
    """A program of Python's, from the repository."""
    subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=True)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder with data and features."""
    runs = tmp_path_factory.mktemp("teacher")
    run("examples/quickstart_generation.py", "moving_digits_wan", "--runs", runs)
    return runs / "moving_digits_wan"


def words_of(teacher: Path) -> tuple[str, ...]:
    basic = "data.dataset_param.basic_parameters"
    return (
        f"model.model_name_or_path={teacher / 'pipeline'}",
        f"{basic}.dataset={teacher / 'data' / 'train.jsonl'}",
        f"{basic}.dataset_dir={teacher / 'data'}",
        f"{basic}.features_dir={teacher / 'features'}",
    )


FIT = (
    "posttrain.dmd.objective=ode_regression", "posttrain.dmd.num_inference_steps=20", "training.train_iters=200",
    "training.lr=1e-3", "training.lr_decay_style=cosine", "training.adam_beta1=0.9", "training.ema.decay=0.98",
)  # fmt: skip
"""As the README has it."""


def test_the_readme_fits_as_the_test_does() -> None:
    text = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    assert all(word in text for word in FIT)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [False, True], ids=["at once", "frame by frame"])
def test_a_student_keeps_what_its_teacher_draws(blocks: bool, teacher: Path, tmp_path: Path) -> None:
    """At least 90 % of the teacher's score, and 5 times as fast at equal batch: `judge_student.py` says so."""
    config, common = EXAMPLE / "moving_digits_dmd_config.yaml", words_of(teacher)
    if blocks:
        common = (*common, "posttrain.dmd.num_frame_per_block=1")
        fit = (config, *common, *FIT, f"posttrain.reference.path={tmp_path / 'trajectories'}")
        run("-m", "mindspeed_mm", "posttrain", "reference", *fit)
        run("-m", "mindspeed_mm", "train", *fit, f"training.save={tmp_path / 'fit'}")
        run("-m", "mindspeed_mm", "export", tmp_path / "fit", tmp_path / "start")
        start = f"model.model_name_or_path={tmp_path / 'start'}"
        common = (*common, start, f"posttrain.reference.model_name_or_path={teacher / 'pipeline'}")
    run("-m", "mindspeed_mm", "train", config, *common, f"training.save={tmp_path / 'run'}")
    run("-m", "mindspeed_mm", "export", tmp_path / "run", tmp_path / "student")
    run(EXAMPLE / "judge_student.py", tmp_path / "student", teacher / "pipeline")
