"""The processes that prepare batches: torch's loader, with errors that name the worker and the samples it was at.

Their memory is watched, so that a leak of a decoder or of a plugin's data set is seen before the host's out-of-memory
killer sees it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from mindspeed_mm.core.errors import DataError, MachineError, first_names
from mindspeed_mm.fsdp.data.dataloader.fetch import BatchMaker, BatchRequest, Delivery
from mindspeed_mm.fsdp.data.dataloader.transport import SLOT_BYTES, SharedSlots
from mindspeed_mm.fsdp.data.open_files import check_keeps_no_file_open

DEFAULT_TIMEOUT_S = 600.0
_POLL_S = 2.0
_GRACE_S = 60


@dataclass(frozen=True)
class WorkerOptions:
    """The processes that prepare batches."""

    num_workers: int = 2
    prefetch_factor: int = 2
    pin_memory: bool = False
    pixels_as_bytes: bool = False
    """Pictures travel as bytes, and become numbers when the batch is moved to the device."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Longest wait for one micro-batch."""
    slot_bytes: int = SLOT_BYTES
    """Room for a micro-batch in shared memory; only what is used of it is ever memory."""
    most_growth_bytes: int = 2 << 30
    """Memory that a worker may gain before all are started anew: decoders leak, and hosts kill."""


class WorkerPool:
    """torch's loader with shared slots, and with errors that name the worker and the samples it was at.

    Args:
        maker: What a worker does; it is given `slots`.
        seed: Of torch's loader.
        options: How many workers, and how long to wait.
    """

    def __init__(self, maker: BatchMaker, seed: int, options: WorkerOptions) -> None:
        self._maker, self._options, self._seed = maker, options, seed
        self._forks = sys.platform == "linux" and "fork" in multiprocessing.get_all_start_methods()
        count = options.num_workers * options.prefetch_factor + 1
        with self._telling_of_failed_starts():
            self.slots = None
            if self._forks:  # a spawned worker would not inherit the memory
                self.slots = SharedSlots(count, options.slot_bytes)
        maker.slots = self.slots
        self._under_way: deque[BatchRequest] = deque()
        self._iterator: Any = None
        self._first = 0
        """Number of the request that worker 0 was dealt first."""

    def deliveries(self, requests: Iterator[BatchRequest]) -> Iterator[Delivery]:
        """What the workers made of the requests, in their order.

        When a worker has gained too much memory, no more is asked of any; once all has come that is under way, they are
        started anew. Batches are functions of their requests, so nothing else changes.
        """
        while True:
            asked, memory = _Recorded(requests, self._under_way), WorkerMemory(self._options.most_growth_bytes)
            self._iterator = self._start(asked)
            while (delivery := self._next()) is not None:
                done = self._under_way.popleft()
                fault = memory.note_delivery([worker.pid for worker in self._workers()])
                if fault is not None and not asked.is_closed:
                    warnings.warn(f"{fault}: the workers are started again", stacklevel=2)
                    asked.is_closed = True
                yield delivery
            if not asked.is_closed:
                return
            self.close()
            self._first = done.number + 1

    def close(self) -> None:
        """End the workers, by force those that do not end by themselves."""
        workers = list(self._workers())
        self._iterator = None
        for worker in workers:
            if worker.is_alive():
                worker.kill()

    def _workers(self) -> Sequence[Any]:
        return getattr(self._iterator, "_workers", ())

    def _start(self, requests: _Recorded) -> object:
        check_keeps_no_file_open(self._maker.dataset)
        options = self._options
        loader = DataLoader(
            self._maker,
            batch_size=None,
            sampler=requests,  # type: ignore[arg-type]
            collate_fn=_pass_delivery,
            num_workers=options.num_workers,
            prefetch_factor=options.prefetch_factor,
            persistent_workers=True,
            timeout=_POLL_S,
            worker_init_fn=_init_worker,
            multiprocessing_context="fork" if self._forks else None,
            generator=torch.Generator().manual_seed(self._seed % 2**63),  # the global one is the model's
        )
        with self._telling_of_failed_starts():
            iterator = iter(loader)
        _leave_the_watch_to_us(iterator)
        return iterator

    @contextmanager
    def _telling_of_failed_starts(self) -> Iterator[None]:
        """A machine without room for the workers is told with the key that asks for them; those started are ended."""
        before = set(multiprocessing.active_children())
        try:
            yield
        except OSError as error:
            for worker in set(multiprocessing.active_children()) - before:
                worker.kill()
            count = self._options.num_workers
            fewer = min(count // 2, os.cpu_count() or 1)
            raise MachineError(
                f"{count} worker processes cannot be started: {error.strerror or error}",
                key="data.dataloader_param.num_workers",
                way_out=f"Lower it, for example to {fewer}; 0 prepares batches in the training process.",
            ) from error

    def _next(self) -> Delivery | None:
        started = time.monotonic()
        while True:
            try:
                return next(self._iterator, None)
            except RuntimeError as error:  # torch's word for: no answer within the poll, or a dead worker
                failure = self._failure(time.monotonic() - started)
                if failure is not None:
                    for worker in self._workers():
                        worker.kill()  # they may wait for a lock that a dead one held, and would hold up the end
                    raise failure from None
                if "timed out" not in str(error):
                    raise

    def _failure(self, waited_s: float) -> DataError | None:
        dead = next((n for n, worker in enumerate(self._workers()) if not worker.is_alive()), None)
        if dead is not None:
            return self._died(dead)
        if waited_s > self._options.timeout_s:
            return self._hung()
        return None

    def _died(self, number: int) -> DataError:
        worker = self._workers()[number]
        code = worker.exitcode
        how = f"ended with {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return DataError(
            f"worker {number} (process {worker.pid}) {how} while it prepared {self._names(number)}",
            where=type(self._maker.dataset.origin).__name__,
            way_out="A killed worker is mostly out of memory: lower num_workers or prefetch_factor.",
        )

    def _hung(self) -> DataError:
        number = self._worker_of(self._under_way[0])
        return DataError(
            f"worker {number} gave nothing for {self._options.timeout_s:.0f} s while it prepared {self._names(number)}",
            where=type(self._maker.dataset.origin).__name__,
            way_out="Look at these samples and at the storage they are on.",
        )

    def _names(self, worker: int) -> str:
        """The samples that a worker has before it."""
        names = []
        for request in self._under_way:
            if self._worker_of(request) == worker:
                names += [self._maker.name(pick.row) for pick in request.picks]
        return first_names(names, most=16) or "no sample"

    def _worker_of(self, request: BatchRequest) -> int:
        """Torch deals requests to the workers in turn."""
        return (request.number - self._first) % self._options.num_workers


class _Recorded(Iterable[BatchRequest]):
    """Requests as torch takes them, noted as under way, until it is closed."""

    def __init__(self, requests: Iterator[BatchRequest], under_way: deque[BatchRequest]) -> None:
        self._requests, self._under_way = requests, under_way
        self.is_closed = False

    def __iter__(self) -> Iterator[BatchRequest]:
        while not self.is_closed and (request := next(self._requests, None)) is not None:
            self._under_way.append(request)
            yield request


def _leave_the_watch_to_us(iterator: Any) -> None:
    """Have torch forget the processes it watches: once any loader of this process installed its SIGCHLD handler, that
    raises for a dead worker in the middle of whatever the trainer is at, and for those killed here too."""
    if getattr(iterator, "_worker_pids_set", False):
        signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False


def _pass_delivery(delivery: Delivery) -> Delivery:
    return delivery


def _init_worker(_: int) -> None:
    """The trainer decides when to stop. A terminal or a scheduler signals the whole group: a worker that left at once
    would fail the trainer while it saves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_GRACE_S))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


# --- memory of the workers --------------------------------------------------------------------------------------------


_LOOK_EVERY = 64
"""Deliveries."""
_MIB = 2**20


class WorkerMemory:
    """Watches what each worker holds for itself alone: slots and mapped files, which all share, are left out.

    Args:
        most_growth_bytes: What a worker may grow by since it was first looked at, after some batches.
    """

    def __init__(self, most_growth_bytes: int) -> None:
        self._most_growth_bytes = most_growth_bytes
        self._deliveries = 0
        self._first: dict[int, int] = {}

    def note_delivery(self, workers: Sequence[int]) -> str | None:
        """What is wrong, if a worker has grown too much; looks now and then.

        Args:
            workers: Process ids, in the workers' order.
        """
        self._deliveries += 1
        if self._deliveries % _LOOK_EVERY:
            return None
        for number, worker in enumerate(workers):
            held = own_bytes(worker)
            grown = held - self._first.setdefault(worker, held)
            if grown > self._most_growth_bytes:
                return f"data worker {number} has grown by {grown / _MIB:.0f} MiB to {held / _MIB:.0f} MiB"
        return None


def own_bytes(process: int) -> int:
    """Anonymous memory of a process, its own and not shared; 0 where the system does not tell, or it is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    return 0
