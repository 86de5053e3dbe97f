"""A run that starts from a folder in Megatron's layout is the run that starts from the Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from mindspeed_mm.checkpoint.megatron.families import family_of
from mindspeed_mm.checkpoint.megatron.layout import MegatronLayout
from mindspeed_mm.checkpoint.safetensors_folder import open_weights
from tests.helpers.distributed import run_ranks
from tests.helpers.megatron_models import files_of
from tests.helpers.parity import compare_steps
from tests.helpers.plan_matrix import FP64
from tests.helpers.planned_steps import overrides, train_steps
from tests.helpers.runs import mm
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_tiny_run

DIVISION = MegatronLayout({"text": ((0, 2),), "vision": ((2, 0),)}, tp=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's YAML; beside it, other weights: as `other` of Hugging Face, and divided by torch alone as `megatron`."""
    folder = tmp_path_factory.mktemp("load")
    yaml = make_tiny_run(folder, **FP64)
    other = make_tiny_qwen3_vl(folder / "other", seed=5)
    config = json.loads((other / "config.json").read_text())
    with open_weights(other) as stored:
        for name, parts in files_of(stored, family_of(config), config, DIVISION).items():
            path = folder / "megatron" / "release" / name
            path.parent.mkdir(parents=True)
            state = {key: {k: t.read().clone() for k, t in part.items()} for key, part in parts.items()}
            torch.save({**state, "checkpoint_version": 3.0}, path)
    (folder / "megatron" / "latest_checkpointed_iteration.txt").write_text("release")
    return yaml


def words(run: Path, source: str) -> list[str]:
    return [*overrides(1, 1), f"training.load={run.parent / source}"]


def test_training_starts_from_the_same_weights(run: Path) -> None:
    compare_steps(train_steps(str(run), words(run, "other")), train_steps(str(run), words(run, "megatron")), 0.0)


def test_the_check_reads_it_and_a_missing_rank_is_named(run: Path) -> None:
    assert mm("check", run, f"training.load={run.parent / 'megatron'}").code == 0
    gone = run.parent / "megatron" / "release" / "mp_rank_01_000"
    moved = gone.rename(run.parent / "moved")
    try:
        for command in ("check", "train"):
            said = mm(command, run, f"training.load={run.parent / 'megatron'}")
            assert said.code == 4
            assert "mp_rank_01_000" in said.out + said.err
    finally:
        moved.rename(gone)


def test_weights_of_another_model_are_told_with_key_and_folder(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run.parent / "megatron", other)
    (file,) = other.glob("release/mp_rank_00_000/*.pt")
    state = torch.load(file)
    state["model"]["image_projector.weight"] = torch.ones(1)
    torch.save(state, file)
    for command in ("check", "train"):
        said = mm(command, run, f"training.load={other}")
        assert said.code == 4
        assert f"{other}: mp_rank_00_000  training.load  image_projector.weight belongs to no" in said.out + said.err


def on_a_rank(yaml: str, words: list[str]) -> object:
    return train_steps(yaml, words)


@pytest.mark.slow
def test_four_ranks_start_from_the_same_weights(run: Path) -> None:
    """Tensor and pipeline parallelism of two each, whose cuts are not those of the folder."""
    plan = ["parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2", *overrides(1, 2)]
    for other in run_ranks(4, on_a_rank, str(run), [*plan, f"training.load={run.parent / 'megatron'}"]):
        compare_steps(train_steps(str(run), [*overrides(1, 2), f"training.load={run.parent / 'other'}"]), other, 1e-9)
