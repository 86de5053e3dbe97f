"""Runs the ranks of a job on this host and says, once and last, why they ended.

torchrun's agent runs in this process, so that its verdict on every rank is at hand. A wish to stop goes to the ranks
through a folder: they save and end with their own exit code, while a rank that dies takes the others along in seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from mindspeed_mm.core.errors import ExitCode, MachineError
from mindspeed_mm.core.redaction import without_secrets
from mindspeed_mm.core.terminal import say, say_failure
from mindspeed_mm.fsdp.distributed.job.launcher_life import LAUNCHER_VARIABLE
from mindspeed_mm.fsdp.train.run.launched import (
    FOLDER_VARIABLE,
    STOPPED_AT_ONCE,
    LaunchFolder,
    RankFailure,
    correct_ending,
    how_to_go_on,
)
from mindspeed_mm.fsdp.train.run.stop_signal import say_stopping
from mindspeed_mm.tasks.launch import rank_start
from mindspeed_mm.tasks.launch.agent import ending_within, meeting_place, quiet_agent

STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def launch(nproc: int, command: Sequence[str], save: str | None) -> int:
    """Start `nproc` ranks on this host, wait for them, and return the exit code of the one that failed first.

    `NNODES`, `NODE_RANK`, `MASTER_ADDR` and `MASTER_PORT` of the environment describe a job over several hosts, and so
    do torchrun's own `PET_NNODES` …, which Kubeflow sets; without them the ranks meet on a free port of this host.

    Args:
        nproc: Ranks on this host.
        command: What each rank runs, after `python -m mindspeed_mm`.
        save: The run folder, for the last words.

    Raises:
        MachineError: There are fewer devices, the environment says too little, or the ranks cannot meet.
    """
    # Imported here: a wrong YAML is answered without torch.
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    from mindspeed_mm.fsdp.utils.device import check_device_count

    check_device_count(nproc)
    with (
        tempfile.TemporaryDirectory(prefix="mm-launch-") as name,
        quiet_agent(),
        meeting_place(os.environ) as (words, inherited),
    ):
        folder = LaunchFolder(Path(name))
        # The agent's own answer to a signal is to end the ranks; QUIT alone is left to it.
        arguments = parse_args(
            [*words, f"--nproc-per-node={nproc}", "--signals-to-handle=SIGQUIT", rank_start.__file__, *command]
        )
        try:
            with _own_environment(folder, inherited), _stopping(folder, SignalException), ending_within(folder.grace_s):
                run(arguments)
            return int(ExitCode.OK)
        except ChildFailedError as error:
            code = _last_words(
                {rank: f.exitcode for rank, f in error.failures.items()}, folder, save, "--json" in command
            )
            correct_ending(folder, code)
            return code
        except SignalException:
            correct_ending(folder, STOPPED_AT_ONCE)
            return STOPPED_AT_ONCE
        except (RuntimeError, OSError, RendezvousError) as error:  # torch's DistError family among them
            raise MachineError(
                f"the ranks could not be started: {str(error).splitlines()[0]}",
                key="MASTER_PORT" if "MASTER_ADDR" in os.environ else "",
                way_out="Check that every host was started with the same NNODES, MASTER_ADDR and MASTER_PORT, and "
                "that the port is free and can be reached.",
            ) from error


@contextmanager
def _own_environment(folder: LaunchFolder, inherited: Mapping[str, str]) -> Iterator[None]:
    """What ranks inherit. Threads are shared out, not multiplied: ranks that each take every core slow one another down
    a hundredfold."""
    before = dict(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[FOLDER_VARIABLE] = str(folder.path)
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    os.environ.update({**inherited, **rank_start.imports_of_this_process(before)})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _stopping(folder: LaunchFolder, stop_at_once: Any) -> Iterator[None]:
    """The first signal asks the ranks to save and stop, a second one kills them."""
    asked = False

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise stop_at_once("stopped at once", signal.SIGKILL)
        asked = True
        folder.ask_to_stop()
        say_stopping()

    listening = [number for number in STOPPING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous: dict[int, Any] = {signal.SIGQUIT: signal.getsignal(signal.SIGQUIT)}  # the agent will change it
    previous |= {number: signal.signal(number, on_signal) for number in listening}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _last_words(codes: Mapping[int, int], folder: LaunchFolder, save: str | None, as_json: bool = False) -> int:
    """Print which rank failed first and why, and how to go on; returns the exit code for it."""
    failures = {rank: _failure(rank, code, folder) for rank, code in codes.items()}
    rank = min(failures, key=lambda rank: _blame(codes[rank], failures[rank], rank))
    failure = failures[rank]
    if not failure.printed:
        everybody_says_so = failures.get(0) is not None and failures[0].message == failure.message
        # A wrong configuration is wrong on every rank, whoever was the first to say so.
        is_configuration = failure.exit_code == ExitCode.USAGE
        prefix = "" if everybody_says_so or is_configuration or not failure.time else f"[rank {rank}] "
        say(without_secrets("\n".join(prefix + line for line in failure.message.split("\n"))), err=True)
    if failure.exit_code not in (ExitCode.RESUMABLE, ExitCode.USAGE):
        for line in how_to_go_on(save):
            say(line, err=True)
    sys.stderr.flush()
    if as_json:
        say_failure(without_secrets(failure.message), failure.exit_code)
    return failure.exit_code


def _failure(rank: int, code: int, folder: LaunchFolder) -> RankFailure:
    reported = folder.failure_of(rank)
    if reported is not None:
        return reported
    if code < 0:
        message = f"rank {rank} was killed by {signal.Signals(-code).name}"
        return RankFailure(message, int(ExitCode.ENVIRONMENT), time=0.0)
    return RankFailure(f"rank {rank} ended with exit code {code}", code, time=0.0)


def _blame(code: int, failure: RankFailure, rank: int) -> tuple[int, float, int]:
    """Sorts the rank that failed first to the front. What a rank has said comes before a sudden end, which may be the
    agent's doing; ranks that lost another one, or were told to end, only follow from somebody's failure."""
    if failure.lost_peers:
        return 2, failure.time, rank
    if failure.time:
        return 0, failure.time, rank
    return (3 if code == -signal.SIGTERM else 1), 0.0, rank
