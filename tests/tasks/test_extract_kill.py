"""Kill -9 at any change that an extraction makes to the disk: nothing half-written is taken for done, at most the batch
in work is lost, and what comes out in the end is to the bit what an unbroken run makes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.feature_store import open_features
from mindspeed_mm.fsdp.data.feature_store.feature_file import check_file
from mindspeed_mm.fsdp.data.feature_store.folder import FeatureFolder
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from tests.helpers.distributed import alone
from tests.helpers.kills import everything, killed_before_each_change
from tests.helpers.processes import ranks_of, wait_until_gone
from tests.tasks.extraction_run import files, forked, make_run, run, wait_for

FEW, MANY = 4, 1000
LEAST = 4 * 6
"""Changes of an extraction that is not killed: each of its six batches is written, named and, once it lies in a shard,
removed; so are shards, index and description."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kill")
    run(make_run(folder))
    return folder


def die_at(change: int, finished: Path) -> None:
    """In this process: kill it in the middle of the change number `change` to the disk, counted from now. Batches that
    got their final name before are listed in `finished`."""
    left = change

    def counts(real: Callable[..., Any], spoil: Callable[..., None] | None = None) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                if spoil is not None:
                    spoil(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return counted

    def half_written(tensors: Any, path: Path, **_: Any) -> None:
        path.write_bytes(safetensors.torch.save(tensors)[:-1])

    def listed(source: Path, target: Path) -> Path:
        placed = rename(source, target)
        if target.name.startswith("batch-"):
            with finished.open("a") as file:
                file.write(f"{int(target.stem.removeprefix('batch-'))}\n")
        return placed

    rename = Path.replace
    Path.replace = counts(listed)  # type: ignore[method-assign]
    Path.unlink = counts(Path.unlink)  # type: ignore[method-assign]
    safetensors.torch.save_file = counts(safetensors.torch.save_file, half_written)


def extract_and_die(prepared: Path, out: Path, change: int, **options: Any) -> bool:
    """Whether the extraction was killed before it could finish. No batch that was finished is lost."""
    finished = out.with_name("finished.txt")
    finished.write_text("")

    def work() -> None:
        die_at(change, finished)
        run(prepared / "run.yaml", out=out, **options)

    code = wait_for(forked(work))
    assert code in (0, -signal.SIGKILL)
    assert {int(line) for line in finished.read_text().splitlines()} <= FeatureFolder(out).done()
    return code != 0


def check_invariants(prepared: Path, out: Path) -> None:
    """What bears its final name is whole; and nobody can train on what is not finished."""
    folder = FeatureFolder(out)
    for path in folder.files():
        check_file(path, "hash")
    if folder.is_finished:
        assert {k: v for k, v in files(out).items() if k.endswith((".safetensors", ".jsonl"))} == {
            k: v for k, v in files(prepared / "features").items() if k.endswith((".safetensors", ".jsonl"))
        }
    else:
        with pytest.raises(DataError, match=r"not finished|holds no features|does not exist"):
            open_features(out, find_adapter(prepared / "model"))


def finish_and_compare(prepared: Path, out: Path) -> None:
    done = len(FeatureFolder(out).done()) if out.is_dir() else 0
    outcome = run(prepared / "run.yaml", out=out)
    assert outcome.kept == 2 * done
    assert files(out) == files(prepared / "features")


@pytest.mark.parametrize("seed", range(FEW))
@alone
def test_killed_and_taken_up_again(prepared: Path, tmp_path: Path, seed: int) -> None:
    draw, out = random.Random(seed), tmp_path / "out"
    for _ in range(2):
        extract_and_die(prepared, out, draw.randrange(40))
        check_invariants(prepared, out)
    finish_and_compare(prepared, out)


@pytest.mark.edge("S2")
@pytest.mark.parametrize(
    "every",
    [
        pytest.param(30, id="some changes"),
        pytest.param(1, marks=pytest.mark.slow, id="every change"),
    ],
)
@alone
def test_killed_before_a_change_that_the_system_sees(prepared: Path, tmp_path: Path, every: int) -> None:
    """Also where files are opened, made writable and folders made."""
    parent, sources = tmp_path / "parent", everything(prepared)
    out = parent / "out"

    def chosen(changes: int) -> range:
        return range(changes % every, changes, every)

    for _ in killed_before_each_change(parent, lambda: None, lambda: run(prepared / "run.yaml", out=out), chosen):
        check_invariants(prepared, out)
        finish_and_compare(prepared, out)
        assert everything(prepared) == sources


@pytest.mark.slow
@alone
def test_killed_at_every_change(prepared: Path, tmp_path: Path) -> None:
    for change in range(MANY):
        out = tmp_path / f"out{change}"
        if not extract_and_die(prepared, out, change):
            assert change > LEAST
            return
        check_invariants(prepared, out)
        finish_and_compare(prepared, out)
    raise AssertionError("never finished")


@pytest.mark.slow
@alone
def test_killed_while_a_set_is_replaced(prepared: Path, tmp_path: Path) -> None:
    for change in range(0, MANY, 3):
        out = shutil.copytree(prepared / "features", tmp_path / f"out{change}")
        if not extract_and_die(prepared, out, change, overwrite=True):
            assert change > LEAST
            return
        check_invariants(prepared, out)
        run(prepared / "run.yaml", out=out)
        assert files(out) == files(prepared / "features")
    raise AssertionError("never finished")


@pytest.mark.slow
@alone
def test_killed_again_and_again(prepared: Path, tmp_path: Path) -> None:
    """A start that gets a little further each time."""
    draw, out = random.Random(0), tmp_path / "out"
    for _ in range(MANY):
        if not extract_and_die(prepared, out, draw.randrange(6, 16)):
            break
        check_invariants(prepared, out)
    assert files(out) == files(prepared / "features")


@pytest.mark.slow
def test_ranks_do_not_outlive_their_launcher(tmp_path: Path) -> None:
    yaml = make_run(tmp_path, count=600)
    command = [sys.executable, "-m", "mindspeed_mm", "extract", str(yaml), "--nproc", "2", "--batch-size", "1"]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)
    folder, deadline = FeatureFolder(tmp_path / "features"), time.monotonic() + 120
    while not folder.path.is_dir() or len(folder.done()) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2 and not folder.is_finished
    process.kill()
    process.wait()
    wait_until_gone(ranks.values(), limit_s=60)
    assert not folder.is_finished
