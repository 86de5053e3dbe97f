"""Run a function on several gloo ranks, bounded in time, from a test.

Every rank is a process forked from a server that has imported torch and transformers once (`preload.py`), so a second
call costs a fraction of a second. Results come back by file; a rank that hangs, dies or raises fails the call with the
stack of every rank.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib.util
import inspect
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_mm.core.garbage import freeze_for_good
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from tests.helpers.rank_results import read_result, write_result
from tests.helpers.rank_server import PRELOADED
from tests.helpers.threads import collect_rarely

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600.0
"""When ranks count as hung. It is far above what any test takes: a busy machine is no fault of a test."""
PEERS_GRACE_S = 3.0
"""How long the other ranks may go on once one has failed: their own errors are worth reading."""
LAST_RESORT_S = 15.0
"""How much later than the parent's limit a rank ends itself, should the parent be gone."""


class RanksFailed(AssertionError):
    """A rank raised, died or ran out of time; the message holds what every rank was doing."""


@dataclass(frozen=True)
class Job:
    """What every rank is told. The function goes by file and name: pytest's module names mean nothing to a child."""

    folder: Path
    world_size: int
    file: str
    name: str
    args: tuple[Any, ...]
    timeout_s: float
    in_group: bool = True

    def function(self) -> Callable[..., Any]:
        return inspect.unwrap(getattr(module_of(self.file), self.name))


def module_of(file: str) -> ModuleType:
    """A test file or helper, by its path: as it was collected, or imported now."""
    for known in list(sys.modules.values()):
        if getattr(known, "__file__", None) == file:
            return known
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = LIMIT_S) -> list[Any]:
    """Call `function(*args)` on `world_size` ranks of a gloo group and return the results by rank.

    Args:
        world_size: Number of processes.
        function: A module-level function of the test file. It runs inside an initialised process group.
        args: The same for every rank; picklable, and of no class that the test file defines.
        timeout_s: Limit on the whole call; collectives time out at the same moment.

    Returns:
        One result a rank: `None`, numbers, strings, tensors, and lists, tuples and dicts of these.

    Raises:
        RanksFailed: A rank raised, died or was still running at the limit.
    """
    return _run(world_size, function, args, timeout_s, in_group=True)


def alone(test: Callable[..., None]) -> Callable[..., None]:
    """A test in one process of its own, outside any group, as `run_ranks` makes them. Its fixtures are picklable.

    The process has a single thread: it may be copied by `os.fork`, which a process of pytest may not, where other tests
    have left threads that hold locks.
    """

    @functools.wraps(test)
    def started(**fixtures: Any) -> None:
        _run(1, test, inspect.signature(test).bind(**fixtures).args, timeout_s=1800, in_group=False)

    return started


def _run(
    world_size: int, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float, *, in_group: bool
) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        job = Job(folder, world_size, inspect.getfile(function), function.__qualname__, args, timeout_s, in_group)
        started = [_start(job, rank) for rank in range(world_size)]
        trouble = _wait(started, folder, timeout_s)
        if trouble:
            raise RanksFailed(_report(trouble, folder, started))
        return [read_result(folder / f"result{rank}") for rank in range(world_size)]


def start_mm(*words: object, log: Path, errors: Path | None = None) -> ForkServerProcess:
    """`mm WORDS` in a process, and a process group, of its own, like a command in a shell but without the seconds
    that its imports take; what it prints goes into a file, its errors into the same one or into another."""
    process = _context().Process(target=_mm_main, args=([str(word) for word in words], log, errors), daemon=True)
    process.start()
    return process


def _mm_main(words: list[str], log: Path, errors: Path | None) -> None:
    freeze_for_good()
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output if errors is None else os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    torch.set_num_threads(1)
    from mindspeed_mm.cli.main import run

    os._exit(run(words))


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    # The server is a fresh interpreter: it finds the preloaded module by this path alone.
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(ROOT) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, paths)])
    return context


def _start(job: Job, rank: int) -> ForkServerProcess:
    process = _context().Process(target=_rank_main, args=(job, rank), daemon=True)
    process.start()
    return process


def _wait(processes: list[ForkServerProcess], folder: Path, timeout_s: float) -> str:
    """Wait for all ranks. Returns what went wrong, or an empty string."""
    deadline = time.monotonic() + timeout_s
    trouble = ""
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        failed = [rank for rank, process in enumerate(processes) if _failed(process, folder, rank)]
        if failed and not trouble:
            trouble = f"rank {failed[0]} failed"
            deadline = min(deadline, time.monotonic() + PEERS_GRACE_S)
        if alive := [process.sentinel for process in processes if process.is_alive()]:
            multiprocessing.connection.wait(alive, max(0.0, deadline - time.monotonic()))
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    _dump_stacks_and_kill([processes[rank] for rank in hung])
    if hung and not trouble:
        return f"ranks {hung} were still running after {timeout_s:g} s"
    failed = [rank for rank, process in enumerate(processes) if _failed(process, folder, rank)]
    return trouble or (f"rank {failed[0]} failed" if failed else "")


def _failed(process: ForkServerProcess, folder: Path, rank: int) -> bool:
    """A rank is judged by its result first: an abort at interpreter exit after the work is done is not a failure."""
    return not process.is_alive() and not (folder / f"result{rank}").exists()


def _dump_stacks_and_kill(processes: list[ForkServerProcess]) -> None:
    for process in processes:
        os.kill(process.pid or 0, signal.SIGUSR1)
    if processes:
        time.sleep(0.3)
    for process in processes:
        process.kill()
        process.join()


def _report(trouble: str, folder: Path, processes: list[ForkServerProcess]) -> str:
    sections = [trouble]
    for rank, process in enumerate(processes):
        process.join(1.0)
        text = "".join(_text(folder / f"{kind}{rank}.txt") for kind in ("error", "stack"))
        finished = "finished" if (folder / f"result{rank}").exists() else "said nothing"
        sections.append(f"--- rank {rank} (exit code {process.exitcode}) ---\n{text or finished}")
    return "\n".join(sections)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _rank_main(job: Job, rank: int) -> None:
    freeze_for_good()  # looking for garbage among what the server has imported would copy all of its memory
    collect_rarely()
    with (job.folder / f"stack{rank}.txt").open("w") as stack_file:
        faulthandler.register(signal.SIGUSR1, stack_file, all_threads=True)
        faulthandler.dump_traceback_later(job.timeout_s + LAST_RESORT_S, exit=True, file=stack_file)
        torch.set_num_threads(1)
        prepare_for_transformers()  # where `mm verify` has started the server, with less in it
        try:
            function = job.function()
            if job.in_group:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.world_size))
                _init_gloo(job, rank)
            write_result(function(*job.args), job.folder / f"result{rank}")
            if dist.is_initialized():  # a function may have left the group itself
                dist.barrier()
                dist.destroy_process_group()
            code = 0
        except BaseException:  # noqa: BLE001  the border of a process: whatever happened is reported by file
            (job.folder / f"error{rank}.txt").write_text(traceback.format_exc())
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        # Interpreter shutdown with live gloo threads aborts now and then.
        os._exit(code)


def _init_gloo(job: Job, rank: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.folder / 'store'}",
        rank=rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout_s),
    )
