"""One process beside the trainer that answers what it is asked, in that order: the trainer's thread goes on meanwhile.

What is asked and answered goes through a pipe, so it is to be short: more than its buffer holds would let both wait for
each other. Larger things lie in memory that both share (`transport.py`).
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import torch

from mindspeed_mm.core.errors import DataError, MMError

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")

_POLL_S = 2.0


class SideJob(ABC, Generic[Asked, Answer]):
    """What such a process does, and how its errors are told."""

    @abstractmethod
    def __call__(self, asked: Asked) -> Answer:
        """The answer to what was asked."""

    @abstractmethod
    def doing(self, asked: Asked) -> str:
        """What it is at, for the error of something unforeseen: `measuring rows 1, 2`."""

    @abstractmethod
    def stopped(self, asked: Asked, how: str) -> DataError:
        """The error where no answer comes."""


class SideProcess(Generic[Asked, Answer]):
    """Asks a process that is forked with all that the job holds; it ends with the trainer, however that ends.

    Where processes cannot be forked, the trainer does the job itself when it asks for the answer.

    Args:
        job: What to do.
        timeout_s: Longest wait for one answer.
    """

    def __init__(self, job: SideJob[Asked, Answer], timeout_s: float) -> None:
        self._job, self._timeout_s = job, timeout_s
        self._under_way: deque[Asked] = deque()
        self._process: Any = None
        if sys.platform != "linux":
            return
        context = multiprocessing.get_context("fork")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(
            target=_answer_requests, args=(job, theirs, self._ours, os.getpid()), daemon=True
        )
        self._process.start()
        self._end = weakref.finalize(self, _kill, self._process)  # multiprocessing would wait for it at the exit
        theirs.close()

    def begin(self, asked: Asked) -> None:
        """Ask. `wait` gives the answers in the order of these calls."""
        self._under_way.append(asked)
        if self._process is not None:
            with suppress(OSError):  # it died, which `wait` will tell
                self._ours.send(asked)

    def wait(self) -> Answer:
        """The answer to the oldest `begin` that has none yet.

        Raises:
            MMError: What the job raised; of something else a `DataError` that names it. Or the process died, or gives
                nothing for too long.
        """
        asked = self._under_way.popleft()
        if self._process is None:
            return self._job(asked)
        started = time.monotonic()
        # A process that is dead may have answered before: what is in the pipe is still read.
        while not self._ours.poll(_POLL_S if self._process.is_alive() else 0):
            if not self._process.is_alive():
                raise self._job.stopped(asked, f"died (exit code {self._process.exitcode})")
            if time.monotonic() - started > self._timeout_s:
                raise self._job.stopped(asked, f"gave nothing for {self._timeout_s:.0f} s")
        try:
            answer = self._ours.recv()
        except (EOFError, OSError):
            raise self._job.stopped(asked, "died") from None
        if isinstance(answer, MMError):
            raise answer
        found: Answer = answer
        return found

    def close(self) -> None:
        """Kill the process, if there is one, and close the connection to it."""
        if self._process is not None:
            self._end()
            self._ours.close()


def _kill(process: Any) -> None:
    process.kill()
    process.join()


def _answer_requests(job: SideJob[object, object], channel: Connection, of_parent: Connection, parent: int) -> None:
    """Answer until the trainer is gone: workers that are forked later may hold its end of the pipe open."""
    of_parent.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    gc.freeze()  # looking through the trainer's objects would copy the memory that they are in
    torch.set_num_threads(1)  # those of the trainer are not here
    with suppress(OSError):  # a question must not take the processor from the trainer that asks it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    while os.getppid() == parent:
        if not channel.poll(_POLL_S):
            continue
        try:
            asked = channel.recv()
        except EOFError:
            return
        channel.send(_answered(job, asked))


def _answered(job: SideJob[object, object], asked: object) -> object:
    try:
        return job(asked)
    except MMError as error:
        return error
    except Exception as error:  # noqa: BLE001 (a process border, and a plugin's data set is foreign code)
        return DataError(f"{type(error).__name__}: {error}, while {job.doing(asked)}")
