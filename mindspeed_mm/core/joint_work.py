"""Work that is cheaper done together: one thread takes what waits, joins what goes together, and does it as a batch."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

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

    Args:
        work: Does a batch; the results in its order. Only this thread calls it.
        fits: Whether a job may join those of a batch.
        name: Of the thread.
    """

    def __init__(
        self,
        work: Callable[[Sequence[Job]], Sequence[Result]],
        fits: Callable[[Sequence[Job], Job], bool],
        name: str = "work",
    ) -> None:
        self._work, self._fits = work, fits
        self._waiting: deque[_Place[Job, Result]] = deque()
        self._changed = threading.Condition()
        self._closed = False
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
        place.future.add_done_callback(lambda future: self._leave(place) if future.cancelled() else None)
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
            self.counts.busy_s += time.monotonic() - begun_s

    def _next_batch(self) -> list[_Place[Job, Result]]:
        """The oldest job with all that fit to it; empty when there will be no more."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                batch: list[_Place[Job, Result]] = []
                for place in list(self._waiting):
                    if batch and not self._fits([each.job for each in batch], place.job):
                        continue
                    self._waiting.remove(place)
                    if place.future.set_running_or_notify_cancel():
                        batch.append(place)
                if batch or (self._closed and not self._waiting):
                    return batch

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
            place.future.set_result(result)
