"""A rank whose launcher is gone ends, wherever it stands; a process that nobody launched goes on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from mindspeed_mm.fsdp.distributed.job import launcher_life
from mindspeed_mm.fsdp.distributed.job.launcher_life import LAUNCHER_VARIABLE, follow_launcher, launcher_of_this_rank


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[int], Callable[[int], None]]:
    """What a rank ends with. No test before this one has left a thread behind that follows a launcher."""
    monkeypatch.setattr(launcher_life, "_THREAD", f"followed in {time.monotonic_ns()}")
    codes: list[int] = []
    event = threading.Event()

    def leave(code: int) -> None:
        codes.append(int(code))
        event.set()

    return event, codes, leave


def test_a_dead_launcher_ends_the_rank(left, capfd: pytest.CaptureFixture[str]):
    event, codes, leave = left
    follow_launcher({LAUNCHER_VARIABLE: "1"}, alone_s=0.05, leave=leave)  # no parent of ours: it died before we looked
    assert event.wait(10)
    assert codes == [3]
    assert "its launcher is gone" in capfd.readouterr().err


def test_a_launcher_that_lives_is_followed_once(left, monkeypatch: pytest.MonkeyPatch):
    event, _, leave = left
    before = threading.active_count()
    for _ in range(2):
        follow_launcher({LAUNCHER_VARIABLE: str(os.getppid())}, alone_s=0.0, leave=leave)
    assert threading.active_count() == before + 1
    assert not event.wait(0.2)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert event.wait(10)


def test_a_process_on_its_own_follows_nobody(left):
    before = threading.active_count()
    follow_launcher({"SLURM_PROCID": "0"}, alone_s=0.0, leave=left[2])
    assert threading.active_count() == before


def test_who_the_launcher_is():
    assert launcher_of_this_rank({LAUNCHER_VARIABLE: "7", "TORCHELASTIC_RUN_ID": "x"}) == 7
    assert launcher_of_this_rank({"TORCHELASTIC_RUN_ID": "x"}) == os.getppid()
    assert launcher_of_this_rank({}) is None
