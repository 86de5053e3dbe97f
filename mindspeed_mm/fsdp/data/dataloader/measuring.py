"""Measuring samples: what a row will cost before it is encoded, in this process or in one beside the trainer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.sample import SampleSize
from mindspeed_mm.fsdp.data.dataloader.sampler import Pick
from mindspeed_mm.fsdp.data.dataloader.seeding import seeded
from mindspeed_mm.fsdp.data.dataset import MMDataset

_POLL_S = 2.0


class Measured(NamedTuple):
    """Sizes of some rows, and the errors of those that cannot be used."""

    sizes: np.ndarray
    """(rows, 2) int32 tokens and patches."""
    errors: dict[int, DataError]
    """Number of a row among them → why it cannot be used."""


class Measurer:
    """Asks a data set for sizes; one that cannot tell has its samples encoded.

    Args:
        dataset: Samples by index.
        seed: Of the random numbers that encoding may draw.
    """

    def __init__(self, dataset: MMDataset, seed: int) -> None:
        self.dataset, self._seed = dataset, seed

    def __call__(self, rows: Sequence[int]) -> Measured:
        """Measure rows by index; a row that cannot be used gets size 0 and its error."""
        sizes, errors = np.zeros((len(rows), 2), dtype=np.int32), {}
        for number, row in enumerate(rows):
            try:
                sizes[number] = self.size(row)
            except DataError as error:
                errors[number] = error
        return Measured(sizes, errors)

    def size(self, row: int) -> SampleSize:
        """Size of a row.

        Raises:
            DataError: The sample cannot be used.
        """
        size = self.dataset.measure(row)
        if size is not None:
            return size
        with seeded(self._seed, Pick(0, row)):
            return SampleSize(len(self.dataset[row]["input_ids"]), 0)


class MeasuringProcess:
    """One process beside the trainer that measures what it is told to, in that order.

    Where processes cannot be forked, the trainer does it itself when it asks for the result.

    Args:
        measure: Forked with all that it holds.
        timeout_s: Longest wait for one answer.
    """

    def __init__(self, measure: Measurer, timeout_s: float) -> None:
        self._measure, self._timeout_s = measure, timeout_s
        self._under_way: deque[list[int]] = deque()
        self._process: Any = None
        if sys.platform != "linux":
            return
        context = multiprocessing.get_context("fork")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_answer, args=(measure, theirs, self._ours, os.getpid()), daemon=True)
        self._process.start()
        self._end = weakref.finalize(self, _kill, self._process)  # multiprocessing would wait for it at the exit
        theirs.close()

    def begin(self, rows: list[int]) -> None:
        """Queue rows, by index, to be measured. `wait` returns the results in the order of these calls."""
        self._under_way.append(rows)
        if self._process is not None:
            with suppress(OSError):  # it died, which `wait` will tell
                self._ours.send(rows)

    def wait(self) -> Measured:
        """The answer to the oldest `begin` that has none yet.

        Raises:
            DataError: The process died, or gives nothing for too long; its rows are named.
        """
        rows = self._under_way.popleft()
        if self._process is None:
            return self._measure(rows)
        started = time.monotonic()
        while not self._ours.poll(_POLL_S if self._process.is_alive() else 0):
            if not self._process.is_alive():
                raise self._failed(rows, f"died (exit code {self._process.exitcode})")
            if time.monotonic() - started > self._timeout_s:
                raise self._failed(rows, f"gave nothing for {self._timeout_s:.0f} s")
        try:
            answer = self._ours.recv()
        except (EOFError, OSError):
            raise self._failed(rows, "died") from None
        if isinstance(answer, Measured):
            return answer
        raise answer

    def close(self) -> None:
        """Kill the process, if there is one, and close the connection to it."""
        if self._process is not None:
            self._end()
            self._ours.close()

    def _failed(self, rows: list[int], how: str) -> DataError:
        dataset = self._measure.dataset
        names = ", ".join(str(dataset.place(row)) for row in rows[:8])
        if len(rows) > 8:
            names += " …"
        return DataError(
            f"the process that measures samples {how} at {names}",
            where=type(dataset.origin).__name__,
            way_out="Look at these samples and at the storage they are on.",
        )


def _kill(process: Any) -> None:
    process.kill()
    process.join()


def _answer(measure: Measurer, channel: Connection, of_parent: Connection, parent: int) -> None:
    """Answer until the trainer is gone: workers that are forked later may hold its end of the pipe open."""
    of_parent.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    while os.getppid() == parent:
        if not channel.poll(_POLL_S):
            continue
        try:
            rows = channel.recv()
        except EOFError:
            return
        channel.send(_measured(measure, rows))


def _measured(measure: Measurer, rows: list[int]) -> Measured | DataError:
    try:
        return measure(rows)
    except Exception as error:  # noqa: BLE001 (a process border, and a plugin's data set is foreign code)
        return DataError(f"{type(error).__name__}: {error}, while measuring rows {rows[:8]}")
