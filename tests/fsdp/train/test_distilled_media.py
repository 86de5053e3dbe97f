"""Students that go on from a first frame: student, teacher and critic see it in training, features and raw clips are
the same run, and who samples from the student gives one."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.helpers.runs import lines, mm, tensors, train, watched_steps
from tests.helpers.tiny_generator_run import make_tiny_generator_run

DMD = (
    "posttrain.method=dmd",
    "posttrain.dmd.denoising_step_list=[1000, 500]",
    "posttrain.dmd.dfake_gen_update_ratio=1",
    "training.diffusion.caption_dropout=0",
    "training.train_iters=1",
)
FEATURES = "data.dataset_param.basic_parameters.features_dir="


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_generator_run(tmp_path_factory.mktemp("i2v"), "i2v")


def drawn(student: Path, grey: int, out: Path) -> bytes:
    """The file of its clip that goes on from a picture of one grey."""
    picture = out.with_suffix(".png")
    Image.new("RGB", (16, 16), (grey, grey, grey)).save(picture)
    words = ("--prompt", "a red box", "--image", picture, "--size", "16x16", "--frames", 5, "--out", out)
    said = mm("infer", student, *words)
    assert said.code == 0, said.err
    return next(out.glob("*.mp4")).read_bytes()


@pytest.mark.slow
def test_a_student_goes_on_from_a_first_frame(yaml: Path, tmp_path: Path) -> None:
    with watched_steps() as seen:
        train(yaml, tmp_path / "raw", *DMD)
    assert mm("extract", yaml, "--out", tmp_path / "features").code == 0
    with watched_steps() as again:
        train(yaml, tmp_path / "features_run", *DMD, f"{FEATURES}{tmp_path / 'features'}")
    assert seen == again
    metrics = []
    for run in ("raw", "features_run"):
        (line,) = [line for line in lines(tmp_path / run / "metrics.jsonl") if "loss" in line]
        metrics.append((line["loss"], line["critic/loss"]))
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4)
    assert tensors(tmp_path / "raw")["model.patch_embedding.weight"].shape[1] == 36  # noise, mask and condition
    assert mm("export", tmp_path / "raw", tmp_path / "student").code == 0
    dark, light = (drawn(tmp_path / "student", grey, tmp_path / f"of_{grey}") for grey in (10, 240))
    assert dark != light and dark == drawn(tmp_path / "student", 10, tmp_path / "again")


def test_blocks_are_refused(yaml: Path) -> None:
    said = mm("check", yaml, *DMD, "posttrain.dmd.num_frame_per_block=1")
    assert said.code == 2 and "'i2v' is not drawn in blocks of frames" in said.out + said.err
