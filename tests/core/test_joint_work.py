"""Joined work: the order of arrival, what fits together, places that are given up, errors that stay with their job."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from mindspeed_mm.core import joint_work
from mindspeed_mm.core.joint_work import JointWorker

WAIT_S = 20


class Recorder:
    """Doubles numbers, once it is let; notes the batches."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.begun, self.let = threading.Event(), threading.Event()

    def work(self, batch: Sequence[int]) -> list[int]:
        self.batches.append(list(batch))
        self.begun.set()
        assert self.let.wait(WAIT_S)
        if any(number < 0 for number in batch):
            raise ValueError(f"negative among {len(batch)}")
        return [2 * number for number in batch]


def both_odd_or_even(batch: Sequence[int], number: int) -> bool:
    return all(each % 2 == number % 2 for each in batch)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def worker(recorder: Recorder) -> Iterator[JointWorker[int, int]]:
    worker = JointWorker(recorder.work, both_odd_or_even, 3)
    yield worker
    recorder.let.set()
    worker.close(WAIT_S)


def held(worker: JointWorker[int, int], recorder: Recorder) -> None:
    """The worker is at a first batch, so that what comes now waits."""
    worker.submit(100)
    assert recorder.begun.wait(WAIT_S)


def test_what_waits_is_joined_by_what_fits(worker: JointWorker[int, int], recorder: Recorder) -> None:
    held(worker, recorder)
    futures = [worker.submit(number) for number in (1, 2, 3, 5, 7, 4)]
    assert worker.waiting == 6 and worker.counts.running == 1
    recorder.let.set()
    assert [future.result(WAIT_S) for future in futures] == [2, 4, 6, 10, 14, 8]
    assert recorder.batches == [[100], [1, 3, 5], [2, 4], [7]]
    worker.close(WAIT_S)
    assert (worker.waiting, worker.counts.batches, worker.counts.jobs, worker.counts.running) == (0, 4, 7, 0)


def test_a_place_that_is_given_up_is_free(worker: JointWorker[int, int], recorder: Recorder) -> None:
    held(worker, recorder)
    gone, kept = worker.submit(1), worker.submit(3)
    assert gone.cancel() and worker.waiting == 1
    recorder.let.set()
    assert kept.result(WAIT_S) == 6 and recorder.batches == [[100], [3]]


def test_a_job_that_fails_takes_no_other_along(worker: JointWorker[int, int], recorder: Recorder) -> None:
    held(worker, recorder)
    good, bad, other = worker.submit(1), worker.submit(-1), worker.submit(3)
    recorder.let.set()
    assert (good.result(WAIT_S), other.result(WAIT_S)) == (2, 6)
    with pytest.raises(ValueError, match="negative among 1"):
        bad.result(WAIT_S)
    assert worker.submit(5).result(WAIT_S) == 10


def test_closing_finishes_what_is_there(worker: JointWorker[int, int], recorder: Recorder) -> None:
    held(worker, recorder)
    waiting = worker.submit(1)
    closer = threading.Thread(target=worker.close)
    closer.start()
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            worker.submit(7).cancel()
        except RuntimeError:
            break
        assert time.monotonic() < deadline_s
    recorder.let.set()
    closer.join(WAIT_S)
    assert waiting.done() and waiting.result() == 2


def test_those_who_come_back_a_moment_later_are_joined(
    worker: JointWorker[int, int], recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that ask again as soon as they are answered; without the wait, every other batch would be of one."""
    for name in ("LONGEST_GATHERING_S", "PAUSE_S", "_GATHERING_SHARE"):
        monkeypatch.setattr(joint_work, name, 1e4)  # what is joined is not to depend on this machine's speed

    def client(number: int, times: int) -> None:
        for _ in range(times):
            assert worker.submit(number).result(WAIT_S) == 2 * number

    threads = [threading.Thread(target=client, args=pair, daemon=True) for pair in ((1, 7), (3, 6), (5, 6))]
    threads[0].start()
    assert recorder.begun.wait(WAIT_S)
    for thread in threads[1:]:
        thread.start()
    while worker.waiting < 2:
        time.sleep(0.001)
    recorder.let.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert [sorted(batch) for batch in recorder.batches] == [[1], *[[1, 3, 5]] * 6]


def test_who_does_not_come_back_is_not_waited_for(worker: JointWorker[int, int], recorder: Recorder) -> None:
    recorder.let.set()
    waits: list[float | None] = []
    worker._changed.wait = lambda timeout=None: waits.append(timeout) or False  # type: ignore[method-assign]
    worker._last_s = 10.0
    try:
        for expected, waited in ((1, []), (2, [joint_work.PAUSE_S]), (2, [joint_work.PAUSE_S] * 2)):
            worker._expected = expected
            worker._waiting.append(object())  # type: ignore[arg-type]
            worker._gather()
            worker._waiting.clear()
            assert waits == waited
    finally:
        del worker._changed.wait
