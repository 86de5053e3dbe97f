"""Runs the ranks of a job on this host and says, once and last, why they ended.

torchrun's agent runs in this process, so that its verdict on every rank is at hand. A wish to stop goes to the ranks
through a folder: they save and end with their own exit code, while a rank that dies takes the others along in seconds.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from mindspeed_mm.core.errors import ExitCode, MachineError
from mindspeed_mm.core.redaction import without_secrets
from mindspeed_mm.core.terminal import say, say_failure
from mindspeed_mm.fsdp.distributed.job.launch import GLOO_INTERFACE
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
        _quiet_agent(),
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


# --- the agent of one node --------------------------------------------------------------------------------------------
# torchrun's agent as `mm … --nproc N` uses it: ranks meet on loopback where they share a host, and none that hangs
# holds up the end.

_LOOPBACK = "127.0.0.1"


@contextmanager
def meeting_place(environment: Mapping[str, str]) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Where and with how many other hosts the agents meet: torchrun's words for it, and variables for the ranks.

    Raises:
        MachineError: The environment describes half of a job over several hosts.
    """
    words = told_meeting_place(environment)
    if words is not None:
        yield words, {}
        return
    store = _loopback_store()
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "")
    inherited = {GLOO_INTERFACE: loopback} if loopback and GLOO_INTERFACE not in environment else {}
    yield ["--nnodes=1", "--node-rank=0", f"--master-addr={_LOOPBACK}", f"--master-port={store.port}"], inherited


def _loopback_store() -> Any:
    """A store that this host alone can reach. The agent, which would listen on every interface, finds it by its port:
    stores of several tenants share one server in a process."""
    from torch.distributed import TCPStore

    with socket.socket() as listening:
        listening.bind((_LOOPBACK, 0))
        listening.listen()
        port = listening.getsockname()[1]
        return TCPStore(
            _LOOPBACK,
            port,
            is_master=True,
            multi_tenant=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )


def told_meeting_place(environment: Mapping[str, str]) -> list[str] | None:
    """What the environment says of it, in torchrun's words; None when it says nothing.

    Raises:
        MachineError: There are several hosts, and a name that belongs to it is not set.
    """
    if "PET_MASTER_ADDR" in environment or "PET_RDZV_ENDPOINT" in environment:
        return []  # torchrun reads these, and all that belong to them, by itself
    hosts = environment.get("NNODES", "1")
    if hosts != "1":
        for name in ("MASTER_ADDR", "NODE_RANK"):
            if name not in environment:
                raise MachineError(
                    f"NNODES is {hosts}, but {name} is not set",
                    where="environment",
                    key=name,
                    way_out="Set NNODES, MASTER_ADDR and MASTER_PORT to the same values on every host, NODE_RANK to "
                    "its number, from 0 (docs/multi-host.md).",
                )
    if "MASTER_ADDR" not in environment:
        return None
    return [
        f"--nnodes={hosts}",
        f"--node-rank={environment.get('NODE_RANK', '0')}",
        f"--master-addr={environment['MASTER_ADDR']}",
        f"--master-port={environment.get('MASTER_PORT', '29500')}",
    ]


@contextmanager
def ending_within(grace_s: Callable[[], float]) -> Iterator[None]:
    """Once a rank has failed the agent asks the others to end, and kills those that have not after 30 s: a rank that is
    frozen, or that waits for the dead one where no signal is looked at, would hold up the last words for as long.

    Replaces `PContext.close` of torch.distributed.elastic (torch 2.11 to 2.13) by itself with another timeout.

    Args:
        grace_s: Asked when a rank has failed: how long the others have.
    """
    from torch.distributed.elastic.multiprocessing import PContext

    real = PContext.close

    def close(context: PContext, death_sig: signal.Signals | None = None, timeout: float = 30) -> None:
        real(context, death_sig, min(timeout, grace_s()))  # type: ignore[arg-type]

    PContext.close = close  # type: ignore[method-assign]
    try:
        yield
    finally:
        PContext.close = real  # type: ignore[method-assign]


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """The agent logs each failure at length; what a person needs of it is said by the launcher's last words."""
    before = logging.root.manager.disable
    if os.environ.get("MM_TRACEBACK") != "1":
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
