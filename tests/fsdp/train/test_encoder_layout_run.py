"""A run whose towers share media says so, reports how evenly, and leaves a checkpoint that one process goes on from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.hooks.step_record import StepRecord, StepRecorder
from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
from mindspeed_mm.fsdp.train.trainer import Trainer
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.fsdp.train.test_encoder_layout_parity import make_media_run
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import compare_steps

pytestmark = pytest.mark.slow
SHARED = [
    "parallel.tensor_parallel_size=2",
    "parallel.encoder_plan.tensor_parallel_size=1",
    "training.adam_fused=true",
    "training.save_interval=1",
]


def run(yaml: str, words: list[str], steps: int | None) -> list[StepRecord]:
    recorder = StepRecorder()
    with keeping_double():
        config = load_with_plugins(Path(yaml), ["training.micro_batch_size=8", *words])
        Trainer(config, TrainOptions(steps=steps), hooks=[recorder]).train()
    return recorder.steps


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[StepRecord], list[StepRecord]]:
    folder = tmp_path_factory.mktemp("run")
    yaml, saved = str(make_media_run(folder / "model", (1, 0, 2, 1, 0))), f"training.save={folder / 'saved'}"
    (expected,) = run_ranks(1, run, yaml, [], None)
    run_ranks(2, run, yaml, [*SHARED, saved], 1)
    (resumed,) = run_ranks(1, run, yaml, [saved], None)
    return folder / "saved", expected, resumed


def test_one_process_goes_on_from_the_checkpoint(found: tuple[Path, list[StepRecord], list[StepRecord]]) -> None:
    _, (_, expected), (resumed,) = found
    compare_steps(expected, resumed, 1e-9)


def test_the_log_says_how_media_are_shared_and_how_evenly(
    found: tuple[Path, list[StepRecord], list[StepRecord]],
) -> None:
    folder = found[0]
    texts = [path.read_text() for path in folder.rglob("*.log")]
    assert any("media  whole media shared by tensor 2 ranks" in text for text in texts)
    lines = [json.loads(line) for line in next(folder.rglob("metrics.jsonl")).read_text().splitlines()]
    measured = [line for line in lines if "encoder_imbalance" in line]
    # Without sharing each of the two ranks would encode all.
    assert measured and all(line["encoder_imbalance_at_home"] == 2.0 for line in measured)
    assert all(1.0 <= line["encoder_imbalance"] < 1.3 for line in measured)
