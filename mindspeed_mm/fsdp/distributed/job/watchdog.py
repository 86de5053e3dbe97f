"""Ends a job that hangs: after a limit, every rank says where it stands, and the process leaves with an exit code.

A collective library only knows that some rank did not come. Here each rank that runs out of time publishes its place,
so that the message names the rank that sleeps in its data, the ranks that wait for it, and those that do not answer,
with their hosts: a cable that was pulled shows as a host of which no rank answers.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from mindspeed_mm.core.errors import ExitCode

GRACE_S = 2.0
"""How long a rank waits for the others, which ran out of time at about the same moment: they began the step together.
The job has to end within 5 s of a limit, and the launcher takes its part of them."""
_NOTICING = 2.5
"""How many times as long ranks may take to notice that a connection is lost."""


@dataclass(frozen=True)
class _Phase:
    name: str
    limit_s: float
    deadline: float


class Watchdog:
    """Watches the phases of this rank's main thread from a thread of its own.

    Args:
        folder: Where `hang_rank<R>.txt` (places of all ranks, stacks of all threads of this one) is written. None:
            stderr gets the stacks.
        tell: Called with the places as a text, and whether this rank speaks for those that it can reach.
        grace_s: How long to wait for the places of other ranks, and to stay for theirs.
        leave: What ends the process; it may be replaced once there is an end to record first.
    """

    hosts: Sequence[str] = ()
    """Host of each rank, once it is known."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        tell: Callable[[str, bool], None] | None = None,
        grace_s: float = GRACE_S,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self._folder, self._tell, self._grace_s = folder, tell or _print, grace_s
        self.leave = leave
        self._phases: list[_Phase] = []
        self._closed = False
        self._changed = threading.Condition()
        self._watched = threading.main_thread()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    @contextmanager
    def phase(self, name: str, limit_s: float) -> Iterator[None]:
        """Limit what is done inside to `limit_s` seconds. Of nested phases the innermost counts; the outer one goes on
        with a full limit afterwards."""
        self._enter(_Phase(name, limit_s, time.monotonic() + limit_s))
        try:
            yield
        finally:
            self._leave_phase()

    def absent(self) -> str:
        """Which ranks do not answer when those that are left call one another, after a collective that failed. Empty on
        one host, where the launcher knows it. Takes `_NOTICING` grace periods, at most twice."""
        if len(set(self.hosts)) < 2:
            return ""
        places = _places_of_ranks("lost the other ranks", _NOTICING * self._grace_s)
        absent = {rank: place for rank, place in places.items() if place in (SILENT, UNKNOWN)}
        return "; ".join(self._lines(absent))

    def close(self) -> None:
        """Stop watching: the thread ends, and no phase has a limit any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _enter(self, phase: _Phase) -> None:
        with self._changed:
            self._phases.append(phase)
            self._changed.notify()

    def _leave_phase(self) -> None:
        with self._changed:
            self._phases.pop()
            if self._phases:
                outer = self._phases.pop()
                self._phases.append(_Phase(outer.name, outer.limit_s, time.monotonic() + outer.limit_s))
            self._changed.notify()

    def _watch(self) -> None:
        phase = self._wait_for_expiry()
        if phase is None:
            return
        expired = time.monotonic()
        place = f"{phase.name} for more than {phase.limit_s:g} s, {_current_line(self._watched)}"
        # On a thread: the folder may be on a network that is gone, and this process must leave all the same.
        report = threading.Thread(target=lambda: self._report(_places_of_ranks(place, self._grace_s)), daemon=True)
        report.start()
        report.join(4 * self._grace_s + 1.0)
        # A rank that leaves tears down connections, and its peers with them: all stay until all have reported.
        time.sleep(max(0.0, expired + self._grace_s - time.monotonic()))
        self.leave(ExitCode.ENVIRONMENT)

    def _wait_for_expiry(self) -> _Phase | None:
        """The phase that ran out of time, or None once closed."""
        with self._changed:
            while not self._closed:
                if not self._phases:
                    self._changed.wait()
                    continue
                phase = self._phases[-1]
                left_s = phase.deadline - time.monotonic()
                if left_s <= 0:
                    return phase
                self._changed.wait(left_s)
        return None

    def _report(self, places: dict[int, str]) -> None:
        text = "\n  ".join(["the job hangs", *self._lines(places)])
        rank = _rank()
        answering = [other for other, place in places.items() if place not in (SILENT, UNKNOWN)]
        self._tell(text, rank == min(answering))
        if self._folder is None:
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            return
        with (self._folder / f"hang_rank{rank}.txt").open("w") as file:
            print(text, file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)

    def _lines(self, places: dict[int, str]) -> list[str]:
        """A line a rank; ranks of one host that are all missing share one."""
        missing: dict[tuple[str, str], list[int]] = {}
        lines: dict[int, str] = {}
        for rank, place in sorted(places.items()):
            if place not in (SILENT, UNKNOWN):
                lines[rank] = f"rank {rank}{self._host_of(rank)}: {place}"
                continue
            ranks = missing.setdefault((self._host_of(rank), place), [])
            ranks.append(rank)
            who = f"rank {rank}"
            if len(ranks) > 1:
                who = f"ranks {', '.join(map(str, ranks))}"
            lines[ranks[0]] = f"{who}{self._host_of(rank)}: {place}"
        return [lines[rank] for rank in sorted(lines)]

    def _host_of(self, rank: int) -> str:
        if len(set(self.hosts)) > 1:
            return f" on {self.hosts[rank]}"
        return ""


SILENT = "no answer (dead, frozen, cut off, or not in a watched phase)"
UNKNOWN = "no answer (from this host the ranks' meeting place cannot be reached)"


def _print(text: str, speaks: bool) -> None:
    if speaks:
        print(text, file=sys.stderr, flush=True)


def _rank() -> int:
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def _current_line(thread: threading.Thread) -> str:
    """`at file:line in function` of a thread's innermost frame outside of libraries, else of its innermost frame."""
    libraries = _library_folders()
    frame = sys._current_frames().get(thread.ident or 0)
    innermost = frame
    while frame is not None and _is_in(frame.f_code.co_filename, libraries):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "ended"
    return f"at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _library_folders() -> list[str]:
    """Python's own, torch's, and those that packages are installed in: an environment may build on others."""
    installed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    return [sysconfig.get_path("stdlib"), str(Path(torch.__file__).parent), *installed]


def _is_in(file: str, libraries: Sequence[str]) -> bool:
    """Whether a file is a library's. This package's is not, which may be installed beside them."""
    folders = tuple(f"{folder}{os.sep}" for folder in libraries)
    return file.startswith(folders) and not file.startswith(_OWN)


_OWN = f"{Path(__file__).parents[3]}{os.sep}"


def _places_of_ranks(own: str, grace_s: float) -> dict[int, str]:
    """Rank → place, for all ranks of the job. A store that fails, cannot be reached, or is held by the hung thread,
    costs the grace period and leaves the others' places unknown."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {_rank(): own}
    places = dict.fromkeys(range(dist.get_world_size()), UNKNOWN) | {_rank(): own}
    exchange = threading.Thread(target=_exchange, args=(places, grace_s), daemon=True)
    exchange.start()
    exchange.join(2 * grace_s)
    return dict(places)


def _exchange(places: dict[int, str], grace_s: float) -> None:
    """Publish this rank's place and read the others' into `places`, over a connection of its own."""
    if not _meeting_place_answers(grace_s):
        return
    rank = _rank()
    missing = [other for other in places if other != rank]
    with suppress(RuntimeError):  # the store may go while it is asked: with the host that keeps it
        store = dist.distributed_c10d._get_default_store().clone()
        store.set(f"hang/{rank}", places[rank])
        places.update(dict.fromkeys(missing, SILENT))
        deadline = time.monotonic() + grace_s
        while missing and time.monotonic() < deadline:
            for other in list(missing):
                if store.check([f"hang/{other}"]):
                    places[other] = store.get(f"hang/{other}").decode()
                    missing.remove(other)
            time.sleep(0.1)


def _meeting_place_answers(limit_s: float) -> bool:
    """Whether the store's host can be reached. Asked first: the store itself tries for minutes and fills a screen."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:  # a store on the file system
        return True
    try:
        with socket.create_connection((address, int(port)), timeout=limit_s):
            return True
    except OSError:
        return False
