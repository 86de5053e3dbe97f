"""torchrun's agent as `mm … --nproc N` uses it: ranks meet on loopback where they share a host, and none that hangs
holds up the end."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.fsdp.distributed.job.launch import GLOO_INTERFACE

LOOPBACK = "127.0.0.1"


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
    yield ["--nnodes=1", "--node-rank=0", f"--master-addr={LOOPBACK}", f"--master-port={store.port}"], inherited


def _loopback_store() -> Any:
    """A store that this host alone can reach. The agent, which would listen on every interface, finds it by its port:
    stores of several tenants share one server in a process."""
    from torch.distributed import TCPStore

    with socket.socket() as listening:
        listening.bind((LOOPBACK, 0))
        listening.listen()
        port = listening.getsockname()[1]
        return TCPStore(
            LOOPBACK,
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
def quiet_agent() -> Iterator[None]:
    """The agent logs each failure at length; what a person needs of it is said by the launcher's last words."""
    before = logging.root.manager.disable
    if os.environ.get("MM_TRACEBACK") != "1":
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
