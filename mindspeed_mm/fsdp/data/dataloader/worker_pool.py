"""The processes that prepare batches: torch's loader, with errors that name the worker and the samples it was at."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.dataloader.fetch import BatchMaker, Delivery, Request
from mindspeed_mm.fsdp.data.dataloader.shared_slots import SLOT_BYTES, SharedSlots

DEFAULT_TIMEOUT_S = 600.0
_POLL_S = 2.0
_GRACE_S = 60
_NAMES_SHOWN = 16


@dataclass(frozen=True)
class WorkerOptions:
    """The processes that prepare batches."""

    num_workers: int = 2
    prefetch_factor: int = 2
    pin_memory: bool = False
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Longest wait for one micro-batch."""
    slot_bytes: int = SLOT_BYTES
    """Room for a micro-batch in shared memory; only what is used of it is ever memory."""


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
        self.slots = (
            SharedSlots(options.num_workers * options.prefetch_factor + 1, options.slot_bytes) if self._forks else None
        )
        maker.slots = self.slots
        self._under_way: deque[Request] = deque()
        self._iterator: Any = None

    def deliveries(self, requests: Iterator[Request]) -> Iterator[Delivery]:
        """What the workers made of the requests, in their order."""
        self._iterator = self._start(requests)
        while (delivery := self._next()) is not None:
            self._under_way.popleft()
            yield delivery

    def close(self) -> None:
        """End the workers, by force those that do not end by themselves."""
        workers = list(self._workers())
        self._iterator = None
        for worker in workers:
            if worker.is_alive():
                worker.kill()

    def _workers(self) -> Sequence[Any]:
        return getattr(self._iterator, "_workers", ())

    def _start(self, requests: Iterator[Request]) -> Any:
        options = self._options
        loader = DataLoader(
            self._maker,
            batch_size=None,
            sampler=_Recorded(requests, self._under_way),  # type: ignore[arg-type]
            collate_fn=_as_it_is,
            num_workers=options.num_workers,
            prefetch_factor=options.prefetch_factor,
            persistent_workers=True,
            timeout=_POLL_S,
            worker_init_fn=_init_worker,
            multiprocessing_context="fork" if self._forks else None,
            generator=torch.Generator().manual_seed(self._seed % 2**63),  # the global one is the model's
        )
        iterator = iter(loader)
        _leave_the_watch_to_us(iterator)
        return iterator

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
        return self._hung() if waited_s > self._options.timeout_s else None

    def _died(self, number: int) -> DataError:
        worker = self._workers()[number]
        code = worker.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with {code}"
        return DataError(
            f"worker {number} (process {worker.pid}) {how} while it prepared {self._names(number)}",
            where=type(self._maker.dataset).__name__,
            way_out="A killed worker is mostly out of memory: lower num_workers or prefetch_factor.",
        )

    def _hung(self) -> DataError:
        number = self._under_way[0].number % self._options.num_workers
        return DataError(
            f"worker {number} gave nothing for {self._options.timeout_s:.0f} s while it prepared {self._names(number)}",
            where=type(self._maker.dataset).__name__,
            way_out="Look at these samples and at the storage they are on.",
        )

    def _names(self, worker: int) -> str:
        """The samples that a worker has before it: torch deals requests to the workers in turn."""
        mine = [r for r in self._under_way if r.number % self._options.num_workers == worker]
        names = [self._maker.name(pick.row) for request in mine for pick in request.picks]
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        return ", ".join(names[:_NAMES_SHOWN]) + more if names else "no sample"


class _Recorded(Iterable[Request]):
    """Requests as torch takes them, noted as under way."""

    def __init__(self, requests: Iterator[Request], under_way: deque[Request]) -> None:
        self._requests, self._under_way = requests, under_way

    def __iter__(self) -> Iterator[Request]:
        for request in self._requests:
            self._under_way.append(request)
            yield request


def _leave_the_watch_to_us(iterator: Any) -> None:
    """Have torch forget the processes it watches: once any loader of this process installed its SIGCHLD handler, that
    raises for a dead worker in the middle of whatever the trainer is at, and for those killed here too."""
    if getattr(iterator, "_worker_pids_set", False):
        signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False


def _as_it_is(delivery: Delivery) -> Delivery:
    return delivery


def _init_worker(_: int) -> None:
    """The trainer decides when to stop. A terminal or a scheduler signals the whole group: a worker that left at once
    would fail the trainer while it saves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_GRACE_S))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
