"""How long samples are, found out as they come near: each data rank measures its share of them and tells the others.

Every rank asks for the same rows at the same points of its program, so that no rank waits for an answer that another
never gives. Ranks that share samples (along context, tensor and pipeline axes) each do so in their own data group, and
find the same. What a row will cost is measured before it is encoded, in this process or in one beside the trainer.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from mindspeed_mm.core.errors import DataError, told_as
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.data.data_utils.sample import SampleSize
from mindspeed_mm.fsdp.data.data_utils.token_arrays import token_arrays
from mindspeed_mm.fsdp.data.dataloader.sampler import Pick
from mindspeed_mm.fsdp.data.dataset import MMDataset

_UNKNOWN, _UNUSABLE = -1, -2
_FEWEST_ROWS = 1024


class SizeBook:
    """Sizes of samples by row, kept for later epochs (8 bytes a row).

    Args:
        measure: Measures some rows.
        rank: This rank among the data ranks.
        ranks: How many there are.
        group: Of the data ranks; None: the others are only imagined, and this one measures everything.
        timeout_s: Longest wait for a share of a window.
    """

    def __init__(
        self,
        measure: Measurer,
        rank: int = 0,
        ranks: int = 1,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._measure, self._group, self._timeout_s = measure, group, timeout_s
        self._rank, self._ranks = (rank, ranks) if group is not None else (0, 1)
        self._sizes = np.full((_FEWEST_ROWS, 2), _UNKNOWN, dtype=np.int32)
        self._errors: dict[int, DataError] = {}
        self._learned = 0
        self._expected: deque[list[int]] = deque()
        self._process: MeasuringProcess | None = None

    def learn(self, sizes: np.ndarray) -> None:
        """Take over sizes that are known beforehand, on all ranks the same.

        Args:
            sizes: (samples, 2) tokens and patches; 0 tokens: the sample cannot be used, which measuring it tells.
        """
        self._make_room(len(sizes))
        self._learned = len(sizes)
        self._sizes[: len(sizes)] = np.where(sizes[:, :1] > 0, sizes, _UNKNOWN)

    def knows(self, samples: int) -> bool:
        """Whether nothing needs to be measured of the first so many samples but those that cannot be used."""
        return self._learned >= samples

    def of(self, rows: Sequence[int]) -> list[SampleSize | DataError]:
        """Size of each row, or why it cannot be used; waits until it is known.

        Raises:
            DataError: The process that measures died or hangs.
        """
        while unknown := self._unknown(rows):
            if not self._expected:
                self._expect(unknown)
            self._take_in(self._expected.popleft())
        return [self._errors.get(row) or self._known(row) for row in rows]

    def expect(self, rows: Sequence[int]) -> None:
        """Begin to measure rows that will be asked for, where a process of its own does it; does not wait."""
        if self._process is None:
            return
        coming = set(chain.from_iterable(self._expected))
        if unknown := [row for row in self._unknown(rows) if row not in coming]:
            self._expect(unknown)

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """While inside, what is expected is measured by a process beside the trainer."""
        self._process = MeasuringProcess(self._measure, self._timeout_s)
        try:
            yield
        finally:
            self._expected.clear()
            process, self._process = self._process, None
            process.close()

    # --- windows -----------------------------------------------------------------------------------------------------

    def _expect(self, rows: list[int]) -> None:
        self._expected.append(rows)
        if self._process is not None:
            self._process.begin(rows[self._rank :: self._ranks])

    def _take_in(self, rows: list[int]) -> None:
        """Wait for this rank's share of a window, and for those of the others."""
        own = self._process.wait() if self._process is not None else self._measure(rows[self._rank :: self._ranks])
        shares: list[Any] = [own]
        if self._group is not None:
            shares = [None] * self._ranks
            dist.all_gather_object(shares, own, group=self._group)
        self._make_room(max(rows))
        for rank, share in enumerate(shares):
            mine = rows[rank :: self._ranks]
            self._sizes[mine] = share.sizes
            for number, error in share.errors.items():
                self._sizes[mine[number]] = _UNUSABLE
                self._errors[mine[number]] = error

    def _unknown(self, rows: Sequence[int]) -> list[int]:
        held = len(self._sizes)
        return [row for row in dict.fromkeys(rows) if row >= held or self._sizes[row, 0] == _UNKNOWN]

    def _known(self, row: int) -> SampleSize:
        return SampleSize(*self._sizes[row].tolist())

    def _make_room(self, row: int) -> None:
        while row >= len(self._sizes):
            self._sizes = np.concatenate([self._sizes, np.full_like(self._sizes, _UNKNOWN)])


# --- measuring --------------------------------------------------------------------------------------------------------


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
            sample = self.dataset[row]
        with told_as(lambda problem: replace(problem, where=problem.where or str(self.dataset.place(row)))):
            return SampleSize(len(token_arrays(sample).ids), 0)


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


# --- random numbers that a sample may draw ----------------------------------------------------------------------------


@contextmanager
def seeded(seed: int, pick: Pick) -> Iterator[None]:
    """Seed the random numbers that a sample may draw by what it is, not by who reads it; afterwards as before."""
    python, numpy, torch_ = random.getstate(), np.random.get_state(), torch.get_rng_state()
    number = derive_seed(seed, pick.epoch, pick.row)
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number % 2**63)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_)
