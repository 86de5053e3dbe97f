"""Runs a function on several gloo processes of this host, on the CPU, and hears how far they are and what they find.

Every process is forked from a server that has imported torch once; it meets the others through a file, says what it
does over a pipe, and prints into a log of its own.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import MachineError, MMError
from mindspeed_mm.core.garbage import freeze_for_good
from mindspeed_mm.core.started_python import SAFE_PATH

PRELOADED = ["torch.distributed.checkpoint", "mindspeed_mm.tasks.verify.run"]
COLLECTIVE_LIMIT_S = 900.0
OTHERS_MAY_SPEAK_S = 3.0
"""After the first failure: those of other ranks may be the cause of it."""
TICK_S = 0.5
_HIDE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
"""Set to nothing, drivers show no accelerator: none of them computes in fp64 as a CPU does."""

Tell = Callable[[str], None]
"""Called in a rank with the name of what is done."""


@dataclass(frozen=True)
class Failure:
    """Describes why a rank ended: an error that a person can act on, or the report of a bug."""

    rank: int
    error: MMError | None
    """Something that a person can act on."""
    report: str = ""
    """A traceback, or how it died, where it is a bug."""
    follows: bool = False
    """The rank only noticed that another one was gone."""


class RankBugError(RuntimeError):
    """A rank ended with an error that nobody foresaw; the message has its traceback."""


def run_ranks(world_size: int, function: str, job: object, heard: Tell) -> list[Any]:
    """Call a `function(job, tell)` on every rank of a gloo group and return the results by rank.

    Args:
        world_size: Number of processes.
        function: `module:name`; this process need not import it.
        job: What all ranks are told; can be pickled, as results can.
        heard: Called with what rank 0 tells, and with an empty string now and then.

    Raises:
        MMError: The first error that a rank raised.
        MachineError: A rank died.
        RankBugError: A rank ended with an error that nobody foresaw.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory(prefix="mm-verify-ranks-") as name, _without_accelerators():
        ranks = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                place = _Process(rank, world_size, Path(name))
                process = context.Process(target=_main, args=(theirs, place, function, job), daemon=True)
                process.start()
                theirs.close()
                ranks.append(_Rank(rank, process, ours))
            return _results(ranks, heard)
        finally:
            for each in ranks:
                each.process.kill()
                each.process.join()


@dataclass(frozen=True)
class _Process:
    """Rank of a process, the number of ranks, and the folder of their meeting file and logs."""

    rank: int
    world_size: int
    folder: Path


@dataclass
class _Rank:
    """A process as its parent sees it."""

    number: int
    process: BaseProcess
    pipe: connection.Connection
    result: Any = None
    is_done: bool = False
    failure: Failure | None = None

    def listen(self, heard: Tell) -> None:
        """Take what it has said."""
        try:
            kind, content = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            self.failure = Failure(self.number, None, f"rank {self.number} died ({_ending(self.process.exitcode)})")
            return
        if kind == "failed":
            self.failure = content
        elif kind == "done":
            self.is_done, self.result = True, content
        elif self.number == 0:
            heard(content)


def _results(ranks: Sequence[_Rank], heard: Tell) -> list[object]:
    deadline: float | None = None
    while open_ranks := [rank for rank in ranks if not (rank.is_done or rank.failure)]:
        if deadline is not None and time.monotonic() > deadline:
            break
        ready = connection.wait([rank.pipe for rank in open_ranks], timeout=TICK_S)
        for rank in open_ranks:
            if rank.pipe in ready:
                rank.listen(heard)
        heard("")
        if deadline is None and any(rank.failure for rank in ranks):
            deadline = time.monotonic() + OTHERS_MAY_SPEAK_S
    failures = [rank.failure for rank in ranks if rank.failure]
    if failures:
        # A cause before what followed from it, and what a person can act on before a bug.
        _raise(min(failures, key=lambda failure: (failure.follows, failure.error is None, failure.rank)))
    return [rank.result for rank in ranks]


def _raise(failure: Failure) -> None:
    if failure.error is not None:
        raise failure.error
    if "\n" not in failure.report:
        raise MachineError(failure.report, way_out="It may have run out of memory; use fewer processes with --nproc.")
    raise RankBugError(f"rank {failure.rank}: {failure.report}")


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {-code}"
    return f"exit code {code}"


@contextmanager
def _without_accelerators() -> Iterator[None]:
    """What processes inherit: no accelerator, a thread each, no imports from the working directory."""
    before = {name: os.environ.get(name) for name in (*_HIDE, "OMP_NUM_THREADS", SAFE_PATH)}
    os.environ.update({**dict.fromkeys(_HIDE, ""), "OMP_NUM_THREADS": "1", SAFE_PATH: "1"})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


# --- in the rank ------------------------------------------------------------------------------------------------------


def _main(pipe: connection.Connection, place: _Process, function: str, job: object) -> None:
    freeze_for_good()  # looking for garbage among what the server has imported would copy all of its memory
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Libraries print too, and not only from Python.
    with (place.folder / f"rank{place.rank}.log").open("w") as file:
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(file.fileno(), number)
    os.environ.update(RANK=str(place.rank), LOCAL_RANK=str(place.rank), WORLD_SIZE=str(place.world_size))
    try:
        pipe.send(("done", _run(place, function, job, lambda what: pipe.send(("told", what)))))
    except MMError as error:
        pipe.send(("failed", Failure(place.rank, error, follows=_lost_peers(error))))
    except Exception as error:  # noqa: BLE001 (the border of a process: its parent says what it was)
        pipe.send(("failed", Failure(place.rank, None, traceback.format_exc(), follows=_lost_peers(error))))
    pipe.close()
    # An interpreter that shuts down with gloo's threads alive aborts now and then.
    os._exit(0)


def _end_with_parent() -> None:
    """A command that is killed can end nobody: its ranks would compute on, and wait for one another."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(place: _Process, function: str, job: object, tell: Tell) -> object:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{place.folder / 'store'}",
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=COLLECTIVE_LIMIT_S),
    )
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(job, tell)
    dist.barrier()
    return result


def _lost_peers(error: Exception) -> bool:
    from mindspeed_mm.fsdp.train.run.failures import has_lost_peers

    return has_lost_peers(error)
