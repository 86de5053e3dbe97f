"""A rank that sleeps is named, the others too, and all of them end in time."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mindspeed_mm.core.errors import ExitCode
from mindspeed_mm.fsdp.distributed.job import watchdog as watchdog_module
from mindspeed_mm.fsdp.distributed.job.watchdog import SILENT, UNKNOWN, Watchdog
from tests.helpers.distributed import RanksFailed, run_ranks


def fetch_slowly() -> None:
    time.sleep(60)


def hang_in_step(folder: str) -> None:
    watchdog = Watchdog(Path(folder), grace_s=1.0)
    with watchdog.phase("step 1", 30.0):
        dist.barrier()
    with watchdog.phase("step 2", 0.5):
        if dist.get_rank() == 1:
            fetch_slowly()
        dist.barrier()


def one_rank_freezes(folder: str) -> None:
    if dist.get_rank() == 1:
        time.sleep(60)
    with Watchdog(Path(folder), grace_s=1.0).phase("save", 0.2):
        dist.barrier()


def test_every_rank_says_where_it_stands(tmp_path):
    started = time.monotonic()
    with pytest.raises(RanksFailed, match=f"exit code {ExitCode.ENVIRONMENT.value}"):
        run_ranks(2, hang_in_step, str(tmp_path), timeout_s=30)
    assert time.monotonic() - started < 20
    for rank in range(2):
        text = (tmp_path / f"hang_rank{rank}.txt").read_text()
        assert "rank 0: step 2 for more than 0.5 s" in text and "in hang_in_step" in text
        assert "rank 1: step 2 for more than 0.5 s" in text and "in fetch_slowly" in text
        assert "Thread 0x" in text


def freeze(folder: str) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    begun = time.monotonic()

    def leave(code: int) -> None:
        (Path(folder) / "left_after").write_text(str(time.monotonic() - begun))
        os._exit(code)

    with Watchdog(Path(folder), leave=leave).phase("step 1", 1.0):
        time.sleep(60)


@pytest.mark.edge("BS15")
def test_a_frozen_rank_is_not_waited_for(tmp_path):
    """A second is left of five: the launcher has half of one to end the ranks, and needs a moment for itself."""
    with pytest.raises(RanksFailed):
        run_ranks(2, freeze, str(tmp_path), timeout_s=8)
    assert 1.0 <= float((tmp_path / "left_after").read_text()) < 1.0 + 4.0
    assert "rank 1: no answer (dead, frozen" in (tmp_path / "hang_rank0.txt").read_text()


def test_a_rank_that_does_not_answer_is_named(tmp_path):
    with pytest.raises(RanksFailed):
        run_ranks(2, one_rank_freezes, str(tmp_path), timeout_s=8)
    assert "rank 1: no answer (dead, frozen" in (tmp_path / "hang_rank0.txt").read_text()
    assert not (tmp_path / "hang_rank1.txt").exists()


def expired(tmp_path: Path) -> tuple[Watchdog, threading.Event]:
    left = threading.Event()
    return Watchdog(tmp_path, grace_s=0.0, leave=lambda code: left.set()), left


def test_phases_in_time_leave_the_process_alone(tmp_path):
    watchdog, left = expired(tmp_path)
    for _ in range(3):
        with watchdog.phase("step", 0.3):
            time.sleep(0.15)
    assert not left.wait(0.4)
    watchdog.close()


def test_an_inner_phase_has_its_own_limit(tmp_path):
    watchdog, left = expired(tmp_path)
    with watchdog.phase("step", 0.4):
        with watchdog.phase("save", 5.0):
            time.sleep(0.6)
        time.sleep(0.2)
        assert not left.is_set()
        assert left.wait(2.0)
    text = (tmp_path / "hang_rank0.txt").read_text()
    assert "rank 0: step for more than 0.4 s" in text and "in test_an_inner_phase_has_its_own_limit" in text


def in_a_library(folder: Path) -> Callable[[Callable[[], None]], None]:
    """A library's function that calls what it is given, of a folder that the environment builds on."""
    packages = folder / "base" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "library_of_a_base.py").write_text("def call(function):\n    function()\n")
    sys.path.append(str(packages))
    return importlib.import_module("library_of_a_base").call


def test_frames_of_libraries_are_passed_over_wherever_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    call = in_a_library(tmp_path)
    watchdog, left = expired(tmp_path)
    with watchdog.phase("step", 0.2):
        call(lambda: call(left.wait))  # the innermost frames: threading, the library
    text = (tmp_path / "hang_rank0.txt").read_text()
    assert f"at {__file__}" in text.splitlines()[1] and "in <lambda>" in text.splitlines()[1]


def test_frames_of_torch_are_passed_over_and_ours_are_not() -> None:
    folders = watchdog_module._library_folders()
    assert watchdog_module._is_in(torch.__file__, folders)
    assert watchdog_module._is_in(threading.__file__, folders)
    assert not watchdog_module._is_in(__file__, folders)
    beside = [*folders, str(Path(watchdog_module.__file__).parents[3])]
    assert not watchdog_module._is_in(watchdog_module.__file__, beside)


def test_a_closed_watchdog_watches_no_more(tmp_path):
    watchdog, left = expired(tmp_path)
    with watchdog.phase("step", 0.1):
        watchdog.close()
        assert not left.wait(0.4)


# --- what is said ----------------------------------------------------------------------------------------------------


def test_missing_ranks_of_a_host_share_a_line(tmp_path):
    watchdog, _ = expired(tmp_path)
    watchdog.close()
    places = {0: "step 3", 1: SILENT, 2: SILENT, 3: SILENT, 4: UNKNOWN}
    assert watchdog._lines(places)[1:] == [f"ranks 1, 2, 3: {SILENT}", f"rank 4: {UNKNOWN}"]
    watchdog.hosts = ["a", "a", "b", "b", "b"]
    assert watchdog._lines(places) == [
        "rank 0 on a: step 3",
        f"rank 1 on a: {SILENT}",
        f"ranks 2, 3 on b: {SILENT}",
        f"rank 4 on b: {UNKNOWN}",
    ]


def test_a_folder_that_does_not_answer_holds_nobody(tmp_path, monkeypatch):
    """A folder on a network that is gone: writing there never returns."""
    told: list[tuple[str, bool]] = []
    left = threading.Event()
    monkeypatch.setattr(Path, "open", lambda *args, **kwargs: threading.Event().wait())
    watchdog = Watchdog(
        tmp_path, grace_s=0.0, leave=lambda code: left.set(), tell=lambda text, speaks: told.append((text, speaks))
    )
    with watchdog.phase("step 9", 0.1):
        assert left.wait(10)
    assert "rank 0: step 9 for more than 0.1 s" in told[0][0] and told[0][1]
