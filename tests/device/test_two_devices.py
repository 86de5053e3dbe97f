"""`mm train --nproc 2`: FSDP2 over two simulated devices, against one process on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.runs import differing, tensors, train
from tests.helpers.simulated_device import NAME, differing_figures, on_the_cpu, races
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_run import make_tiny_run

LIMIT_S = 400
ACTIVATIONS = ("features.enable_activation_offload=true", "training.micro_batch_size=4")
"""Rows enough for storages that are worth a copy."""
AVERAGE = ("training.ema.enable=true", "training.ema.decay=0.5")
WAYS: dict[str, tuple[str, ...]] = {
    "activations on the host, recompute, average": (
        *ACTIVATIONS,
        "features.recompute=true",
        *AVERAGE,
    ),
    "parameters on the host": ("parallel.fsdp_plan.cpu_offload=true",),
    "moments and gradients on the host": ("training.optimizer=adamw_swap", "features.enable_gradient_offload=true"),
    "adapters, packed, average": (
        *AVERAGE,
        "training.lora.enable=true",
        "training.lora.rank=4",
        "data.dataset_param.basic_parameters.packing=true",
        "data.dataset_param.basic_parameters.cutoff_len=128",
        "training.micro_batch_size=1",
    ),
}


def train_on_two(yaml: Path, save: Path, *words: object) -> str:
    """`mm train --nproc 2`, which must succeed without a race; returns what it printed."""
    command = [sys.executable, "-m", "mindspeed_mm", "train", yaml, f"training.save={save}", *words, "--nproc", 2]
    ended = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert races(ended.stderr) == []
    return ended.stdout


def assert_as_one_process_on_the_cpu(yaml: Path, folder: Path, *words: str) -> None:
    assert f"{NAME} × 2" in train_on_two(yaml, folder / "device", *words)
    with on_the_cpu():
        train(yaml, folder / "cpu", *words, "training.gradient_accumulation_steps=2")
    assert differing_figures(folder / "device", folder / "cpu") == []


@pytest.mark.parametrize("way", WAYS)
def test_training_is_as_in_one_process_on_the_cpu(way: str, tmp_path: Path) -> None:
    assert_as_one_process_on_the_cpu(make_tiny_run(tmp_path), tmp_path, "training.train_iters=3", *WAYS[way])


@pytest.mark.parametrize("family", ["flux", "t2v"])
def test_generators_train_as_in_one_process_on_the_cpu(family: str, tmp_path: Path) -> None:
    yaml = make_tiny_generator_run(tmp_path, family)
    words = ("training.train_iters=3", "features.recompute=true", *AVERAGE)
    assert_as_one_process_on_the_cpu(yaml, tmp_path, *words)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    yaml = make_tiny_run(tmp_path)
    words = (
        "training.save_interval=2",
        "training.save_async=true",
        *AVERAGE,
        "training.optimizer=muon",
        "training.train_iters=4",
    )
    train_on_two(yaml, tmp_path / "whole", *words)
    train_on_two(yaml, tmp_path / "cut", *words, "--steps", 2)
    train_on_two(yaml, tmp_path / "cut", *words)
    assert differing(tensors(tmp_path / "whole"), tensors(tmp_path / "cut")) == []
