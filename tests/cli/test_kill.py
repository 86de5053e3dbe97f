"""Kill -9 of `mm train` at random moments while it saves every step: every start resumes at the newest committed
step, and the weights in the end are bitwise those of a run that nobody killed.

How far a start gets depends on the machine: runs are long until the last start, which ends soon after the others.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from tests.helpers.distributed import start_mm
from tests.helpers.runs import differing, newest, tensors, train
from tests.helpers.tiny_run import make_tiny_run

ENDLESS = 100_000
LIMIT_S = 600.0


SCRIPT = str(Path(__file__).parents[2] / "mindspeed_mm" / "fsdp" / "train" / "trainer.py")
"""What launch scripts of older files start, torchrun in front; the same as the command."""


def kill_after(process: ForkServerProcess, save: Path, step: int, delay_s: float) -> None:
    """Kill the process group a moment after step `step` was committed."""
    deadline = time.monotonic() + LIMIT_S
    while newest(save) < step and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(delay_s)
    os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    training = {"train_iters": ENDLESS, "save_interval": 1, "save_total_limit": 3, "log_interval": 4}
    return make_tiny_run(tmp_path_factory.mktemp("kill"), training=training)


def kill_and_restart(yaml: Path, save: Path, kills: int, *extra: str) -> None:
    draw = random.Random(kills)
    for _ in range(kills):
        log = save.with_name(f"{save.name}.log")
        process = start_mm("train", yaml, f"training.save={save}", *extra, log=log)
        kill_after(process, save, newest(save) + draw.randint(1, 3), draw.uniform(0.0, 0.2))


def finish_and_compare(yaml: Path, save: Path, *extra: str) -> None:
    """Run a few steps more, to the end, and compare every tensor with a run in one piece."""
    resumed_from = newest(save)
    iters = f"training.train_iters={resumed_from + 3}"
    command = [sys.executable, SCRIPT, str(yaml), f"training.save={save}", iters, *extra]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resume from {save / f'iter_{resumed_from:07d}'}" in done.stdout, done.stdout
    whole = save.with_name(f"{save.name}-whole")
    train(yaml, whole, iters, "training.save_interval=0")
    assert newest(save) == newest(whole) == resumed_from + 3
    assert differing(tensors(save), tensors(whole)) == []


@pytest.mark.slow
def test_killed_run_ends_bitwise_like_an_unbroken_one(yaml: Path) -> None:
    save = yaml.parent / "killed"
    kill_and_restart(yaml, save, 3)
    finish_and_compare(yaml, save)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_killed_twenty_times(yaml: Path, mode: str) -> None:
    extra = f"training.save_async={str(mode == 'async').lower()}"
    save = yaml.parent / f"killed-{mode}"
    kill_and_restart(yaml, save, 20, extra)
    finish_and_compare(yaml, save, extra)
