"""What a person sees of long work: nothing at first, then a bar or a line, with the rate and the time left."""

from __future__ import annotations

import io

import pytest

from mindspeed_mm.fsdp.utils import work_progress
from mindspeed_mm.fsdp.utils.work_progress import WorkProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(work_progress.time, "monotonic", lambda: now[0])
    monkeypatch.delenv("NO_COLOR", raising=False)
    return now


def told(stream: io.StringIO, clock: list[float], rank: int = 0, world_size: int = 1) -> str:
    """Forty samples, one a second."""
    progress = WorkProgress(stream=stream, rank=rank, world_size=world_size)
    progress.begin(40)
    for _ in range(40):
        clock[0] += 1
        progress.advance(1)
    progress.end()
    return stream.getvalue()


def test_a_file_gets_a_line_at_times(clock: list[float]) -> None:
    assert told(io.StringIO(), clock).splitlines() == [
        "5/40 samples  1.0 samples/s  00:00:35 left",
        "20/40 samples  1.0 samples/s  00:00:20 left",
        "35/40 samples  1.0 samples/s  00:00:05 left",
    ]


def test_a_terminal_gets_a_bar_that_goes_away(clock: list[float]) -> None:
    text = told(Terminal(), clock)
    assert text.count("samples/s") == 36
    assert "\n" not in text and text.endswith("\r\033[K")


def test_rank_0_speaks_of_its_share_and_others_are_silent(clock: list[float]) -> None:
    assert "5/40 samples of rank 0 (of 4)  1.0 samples/s" in told(io.StringIO(), clock, 0, 4)
    assert told(io.StringIO(), clock, 1, 4) == ""


def test_slow_work_tells_the_time_of_each(clock: list[float]) -> None:
    stream = io.StringIO()
    progress = WorkProgress("runs", stream, total=3)
    for done in (0, 1, 0, 1):
        clock[0] += 40
        progress.advance(done)
    assert stream.getvalue().splitlines() == [
        "1/3 runs  00:01:20 each  00:02:40 left",
        "1/3 runs  00:02:00 each  00:04:00 left",
        "2/3 runs  00:01:20 each  00:01:20 left",
    ]
