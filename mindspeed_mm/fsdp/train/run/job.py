"""The job that this process is a rank of: ranks meet, agree on what they are about to do, and part."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mindspeed_mm.core.artifacts import RunFolder, make_writable_folder
from mindspeed_mm.fsdp.distributed.job.launch import (
    gather_hosts,
    initialize_distributed,
    resolve_launch,
    shutdown_distributed,
)
from mindspeed_mm.fsdp.distributed.job.watchdog import Watchdog
from mindspeed_mm.fsdp.distributed.parallel_state import (
    ParallelState,
    destroy_parallel_state,
    init_parallel_state,
)
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from mindspeed_mm.fsdp.params.training_args import TrainingArguments
from mindspeed_mm.fsdp.train.run.failures import PeersLost, explained, has_lost_peers
from mindspeed_mm.fsdp.train.run.launched import tell_of_hang
from mindspeed_mm.fsdp.train.run.start_checks import check_device, check_ranks_agree
from mindspeed_mm.fsdp.utils.device import (
    allow_short_fp32,
    check_device_count,
    deterministic_kernels,
    set_local_device,
)

PATIENCE_S = 60.0
"""How much longer a collective waits than the watchdog."""
RECORD_S = 2.0
"""How long a job that hangs tries to record its end."""

Phase = Callable[[str, float], AbstractContextManager[None]]
"""`(name, limit_s)`: what is done inside may take so long; the watchdog ends the job otherwise."""


def without_limit(_name: str, _limit_s: float) -> AbstractContextManager[None]:
    """A phase without a watchdog."""
    return nullcontext()


@dataclass(frozen=True)
class DataShare:
    """Which of the samples a rank has."""

    rank: int = 0
    """Among the ranks that hold different samples."""
    ranks: int = 1
    """How many these are."""
    group: dist.ProcessGroup | None = None
    """These ranks; None: this one asks no other."""


@dataclass(frozen=True)
class Job:
    """What a rank knows once the ranks have met."""

    rank: int
    """Global rank of this process."""
    world_size: int
    """Number of ranks."""
    device: torch.device
    """Device of this rank."""
    state: ParallelState
    """Meshes and groups of the parallel plan."""
    training: TrainingArguments
    """The `training` section, for its limits of time."""
    watchdog: Watchdog | None = None
    """Ends a job that hangs; None where there are no other ranks to wait for."""

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold different samples; None when there is only one."""
        if self.state.data_size > 1:
            return self.state.axis_group("dp")
        return None

    @property
    def data_share(self) -> DataShare:
        """The samples of this rank."""
        return DataShare(self.state.data_rank, self.state.data_size, self.data_group)

    @property
    def phase(self) -> Phase:
        """Limits how long a part of the run may take."""
        if self.watchdog is not None:
            return self.watchdog.phase
        return without_limit

    def setup(self, what: str) -> AbstractContextManager[None]:
        """The phase of a part that comes before the first step."""
        return self.phase(what, self.training.setup_timeout_s)

    def record_hang_by(self, record_end: Callable[[str, int], None]) -> None:
        """Have `record_end(status, exit_code)` called when the watchdog ends this process."""
        if self.watchdog is not None:
            self.watchdog.leave = lambda exit_code: _leave_hung(record_end, exit_code)


@contextmanager
def joined(arguments: Arguments) -> Iterator[Job]:
    """Meet the other ranks; inside, the process group and the parallel state exist, and the device computes as the
    configuration says. A process group that the caller had made stays the caller's.

    Raises:
        MMError: The ranks do not come together, were started differently, or lost each other inside.
    """
    with _watched(arguments.training) as watchdog, explained():
        joined_already = dist.is_initialized()
        rank, local_rank, world_size = _meet(arguments.training, watchdog)
        try:
            job = _agree(arguments, watchdog, rank, local_rank, world_size)
            with numerics(arguments.training):
                yield job
        except BaseException as error:
            absent = watchdog.absent() if watchdog is not None and has_lost_peers(error) else ""
            leave(joined_already, wait=False)  # the other ranks may never arrive
            if absent:
                raise PeersLost(f"lost other ranks: {absent}", way_out="See there what happened.") from error
            raise
        with job.setup("leaving together"):
            leave(joined_already, wait=True)


@contextmanager
def _watched(training: TrainingArguments) -> Iterator[Watchdog | None]:
    """Phases are watched where there are other ranks to wait for."""
    if resolve_launch(os.environ).world_size == 1:
        yield None
        return
    folder = RunFolder(training.save).log if training.save else None
    if folder is not None:
        make_writable_folder(folder)
    watchdog = Watchdog(folder, tell=tell_of_hang(training.save))
    try:
        yield watchdog
    finally:
        watchdog.close()


def _meet(training: TrainingArguments, watchdog: Watchdog | None) -> tuple[int, int, int]:
    """Join the process group; returns (rank, local rank, world size)."""
    with _setup(training, watchdog, "joining the job"):
        check_device_count(resolve_launch(os.environ).local_rank + 1)
        # Collectives wait longer than the watchdog does: it can say who is missing.
        longest_s = max(training.setup_timeout_s, training.step_timeout_s, training.save_timeout_s)
        return initialize_distributed(timeout_s=longest_s + PATIENCE_S)


def _agree(arguments: Arguments, watchdog: Watchdog | None, rank: int, local_rank: int, world_size: int) -> Job:
    """Compare what the ranks are about to do, and lay out the parallel plan."""
    with _setup(arguments.training, watchdog, "comparing the ranks"):
        check_ranks_agree(arguments, world_size)
        if watchdog is not None:
            watchdog.hosts = gather_hosts()
        check_device(arguments.parallel)
        device = set_local_device(local_rank)
        state = init_parallel_state(resolve_parallel_sizes(arguments.parallel, world_size), device.type)
        return Job(rank, world_size, device, state, arguments.training, watchdog)


def _setup(training: TrainingArguments, watchdog: Watchdog | None, what: str) -> AbstractContextManager[None]:
    if watchdog is None:
        return nullcontext()
    return watchdog.phase(what, training.setup_timeout_s)


def leave(joined_already: bool, *, wait: bool) -> None:
    """Undo what `joined` set up.

    Args:
        joined_already: The process group is the caller's, and stays.
        wait: Let every rank arrive first.
    """
    destroy_parallel_state()
    if not joined_already:
        shutdown_distributed(wait=wait)


@contextmanager
def numerics(training: TrainingArguments) -> Iterator[None]:
    """Inside, the device's arithmetic is what the configuration says."""
    if training.allow_hf32 is not None:
        allow_short_fp32(training.allow_hf32)
    with deterministic_kernels() if training.use_deter_comp else nullcontext():
        yield


def _leave_hung(record_end: Callable[[str, int], None], exit_code: int) -> None:
    """What the watchdog does last. On a thread: the run folder may be what hangs."""
    recording = threading.Thread(target=record_end, args=("failed", exit_code), daemon=True)
    recording.start()
    recording.join(RECORD_S)
    os._exit(exit_code)
