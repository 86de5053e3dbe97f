"""Kill -9 of the real command at random moments while it saves every step: every start resumes at the newest committed
step, and the weights in the end are bitwise those of a run that nobody killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.helpers.tiny_run import make_tiny_run

STEPS = 24
LIMIT_S = 120.0


def start(yaml: Path, save: Path, *extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "mindspeed_mm", "train", str(yaml), f"training.save={save}", *extra],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    return output


def newest(save: Path) -> int:
    """The newest committed step: a committed folder has its final name."""
    return max((int(p.name.removeprefix("iter_")) for p in save.glob("iter_*") if p.suffix != ".tmp"), default=0)


def kill_after(process: subprocess.Popen[str], save: Path, step: int, delay_s: float) -> None:
    """Kill the process group a moment after step `step` was committed."""
    deadline = time.monotonic() + LIMIT_S
    while newest(save) < step and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(delay_s)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def weights(save: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the last checkpoint, model and optimizer."""
    path = save / f"iter_{newest(save):07d}"
    tree: dict[str, torch.Tensor] = {}
    metadata = dcp.FileSystemReader(path).read_metadata()
    for name, entry in metadata.state_dict_metadata.items():
        tree[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    dcp.load(tree, checkpoint_id=path, no_dist=True)
    return tree


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    training = {"train_iters": STEPS, "save_interval": 1, "save_total_limit": 3, "log_interval": 4}
    return make_tiny_run(tmp_path_factory.mktemp("kill"), training=training)


@pytest.fixture(scope="module")
def unbroken(yaml: Path) -> dict[str, torch.Tensor]:
    finish(start(yaml, yaml.parent / "unbroken"))
    return weights(yaml.parent / "unbroken")


def killed_run(yaml: Path, save: Path, kills: int, *extra: str, steps: int = STEPS) -> None:
    draw = random.Random(kills)
    for _ in range(kills):
        before = newest(save)
        process = start(yaml, save, *extra)
        kill_after(process, save, min(before + draw.randint(1, 3), steps - 1), draw.uniform(0.0, 0.2))
    resumed_from = newest(save)
    output = finish(start(yaml, save, *extra))
    assert f"iter_{resumed_from:07d}" in output, output


def assert_bitwise(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, different


def test_killed_run_ends_bitwise_like_an_unbroken_one(yaml: Path, unbroken: dict[str, torch.Tensor]) -> None:
    save = yaml.parent / "killed"
    killed_run(yaml, save, 3)
    assert_bitwise(weights(save), unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_killed_twenty_times(yaml: Path, mode: str) -> None:
    extra = ("training.train_iters=80", f"training.save_async={str(mode == 'async').lower()}")
    unbroken, save = yaml.parent / f"unbroken-{mode}", yaml.parent / f"killed-{mode}"
    finish(start(yaml, unbroken, *extra))
    killed_run(yaml, save, 20, *extra, steps=80)
    assert_bitwise(weights(save), weights(unbroken))


def test_stop_signal_saves_and_ends_with_75(yaml: Path, unbroken: dict[str, torch.Tensor]) -> None:
    save = yaml.parent / "stopped"
    process = start(yaml, save, "training.save_interval=1000")
    deadline = time.monotonic() + LIMIT_S
    while not (save / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, output
    assert "Run the same command again" in output
    assert "Traceback" not in output
    finish(start(yaml, save, "training.save_interval=1000"))
    assert_bitwise(weights(save), unbroken)
