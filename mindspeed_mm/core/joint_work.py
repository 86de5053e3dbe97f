"""Work that is cheaper done together: one thread takes what waits, joins what goes together, and does it as a batch.

Whoever asks again once a batch is done comes back a moment after it. A worker that took the first of them alone would
keep all others waiting for a batch of one, and so on for ever: it waits for that moment.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

LONGEST_GATHERING_S = 0.1
PAUSE_S = 0.05
"""When nothing has come for so long, no further process is about to join."""
_GATHERING_SHARE = 0.25
"""Of the time that the batch before has taken: the most that waiting can cost."""
Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass
class WorkCounts:
    """What was done so far."""

    batches: int = 0
    jobs: int = 0
    busy_s: float = 0.0
    running: int = 0
    """Jobs of the batch that is being worked on."""


@dataclass(eq=False)
class _Place(Generic[Job, Result]):
    job: Job
    future: Future[Result] = field(default_factory=Future)


class JointWorker(Generic[Job, Result]):
    """A thread that works on what is submitted, in order of arrival; what arrives meanwhile waits for the next batch.

    The next batch begins once as many jobs wait as there were when the last one ended, or once no more come; a single
    job after a single job begins at once.

    Args:
        work: Does a batch; the results in its order, an exception for a job that failed alone. Only this thread calls
            it.
        fits: Whether a job may join those of a batch.
        most: Jobs of a batch.
        name: Of the thread.
    """

    def __init__(
        self,
        work: Callable[[Sequence[Job]], Sequence[Result | Exception]],
        fits: Callable[[Sequence[Job], Job], bool],
        most: int,
        name: str = "work",
    ) -> None:
        self._work, self._fits, self._most = work, fits, most
        self._waiting: deque[_Place[Job, Result]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._expected, self._last_s = 0, 0.0
        """How many were answered or waited when the batch before ended, and how long it took."""
        self.counts = WorkCounts()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many jobs have not begun."""
        return len(self._waiting)

    def submit(self, job: Job) -> Future[Result]:
        """Have a job done. Until it begins, cancelling the future gives its place up.

        Raises:
            RuntimeError: The worker is closed.
        """
        place: _Place[Job, Result] = _Place(job)
        with self._changed:
            if self._closed:
                raise RuntimeError("closed")
            self._waiting.append(place)
            self._changed.notify()

        def leave(future: Future[Result]) -> None:
            if future.cancelled():
                self._leave(place)

        place.future.add_done_callback(leave)
        return place.future

    def close(self, timeout_s: float | None = None) -> None:
        """Take nothing more, finish what is there, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _leave(self, place: _Place[Job, Result]) -> None:
        with self._changed:
            if place in self._waiting:
                self._waiting.remove(place)

    def _run(self) -> None:
        while batch := self._next_batch():
            begun_s = time.monotonic()
            self.counts.running = len(batch)
            self._answer(batch)
            self.counts.running = 0
            self.counts.batches += 1
            self.counts.jobs += len(batch)
            self._expected, self._last_s = len(batch) + len(self._waiting), time.monotonic() - begun_s
            self.counts.busy_s += self._last_s

    def _next_batch(self) -> list[_Place[Job, Result]]:
        """The oldest job with all that fit to it; empty when there will be no more."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                self._gather()
                batch: list[_Place[Job, Result]] = []
                for place in list(self._waiting):
                    if len(batch) == self._most:
                        break
                    # passed over, not a barrier: later jobs that fit may overtake it once
                    if batch and not self._fits([each.job for each in batch], place.job):
                        continue
                    self._waiting.remove(place)
                    # False: it was cancelled between arrival and now
                    if place.future.set_running_or_notify_cancel():
                        batch.append(place)
                if batch or (self._closed and not self._waiting):
                    return batch

    def _gather(self) -> None:
        """Wait for as many jobs as there were when the batch before ended, as long as they keep coming."""
        end_s = time.monotonic() + min(LONGEST_GATHERING_S, _GATHERING_SHARE * self._last_s)
        while len(self._waiting) < min(self._expected, self._most) and not self._closed:
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not self._changed.wait(min(left_s, PAUSE_S)):
                return

    def _answer(self, batch: Sequence[_Place[Job, Result]]) -> None:
        try:
            results = self._work([place.job for place in batch])
        except Exception as error:  # noqa: BLE001 - the border of the thread: whoever waits is told
            if len(batch) == 1:
                batch[0].future.set_exception(error)
                return
            for place in batch:  # one job must not take its neighbours along
                self._answer([place])
            return
        for place, result in zip(batch, results, strict=True):
            if isinstance(result, Exception):
                place.future.set_exception(result)
            else:
                place.future.set_result(result)
