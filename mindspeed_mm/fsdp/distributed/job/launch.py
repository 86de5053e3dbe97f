"""Joins the process group: from torchrun's or Slurm's environment, or as a group of one; and finds which network
interface of this host leads to another one.

gloo takes the interface that the host's own name stands for. On many machines that is the loopback (`127.0.1.1 name` in
`/etc/hosts`, a name that cannot be resolved in a container), and ranks of other hosts then knock at their own door.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.fsdp.distributed.job.launcher_life import follow_launcher
from mindspeed_mm.fsdp.distributed.parallel_state import destroy_parallel_state, forget_meshes
from mindspeed_mm.fsdp.utils.device import device_to_bind, distributed_backend, get_device_type, set_local_device
from mindspeed_mm.fsdp.utils.ranks import Ranks

DEFAULT_MASTER_PORT = 29500
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

_hooks_before: list[Any] = []


@dataclass(frozen=True)
class LaunchInfo:
    """Place of this process in the job, as its launcher states it."""

    rank: int
    local_rank: int
    world_size: int
    master_address: str = ""
    """Empty for a process on its own, which needs no rendezvous."""
    master_port: int = DEFAULT_MASTER_PORT
    ranks_here: int = 0
    """Ranks on this host; 0 when the launcher does not say."""

    @property
    def spans_hosts(self) -> bool:
        """Whether some ranks are known to be on other hosts."""
        return 0 < self.ranks_here < self.world_size


def initialize_distributed(timeout_s: float) -> tuple[int, int, int]:
    """Bind this process to its device, tie it to its launcher's life and join the job's process group.

    Args:
        timeout_s: Limit on the rendezvous and on every collective after it.

    Returns:
        `(rank, local_rank, world_size)`.

    Raises:
        MachineError: The launcher's variables contradict each other, or the group does not come together.
    """
    info = resolve_launch(os.environ)
    follow_launcher(os.environ)
    set_local_device(info.local_rank)
    if not dist.is_initialized():
        _hooks_before.append(sys.excepthook)  # torch marks every later traceback of the process with this rank
        _join(info, timedelta(seconds=timeout_s))
    return info.rank, info.local_rank, info.world_size


def shutdown_distributed(*, wait: bool = True) -> None:
    """Leave the process group, with the groups cut from it; does nothing when there is none.

    Args:
        wait: Let every rank arrive first. Say False when this rank leaves on an error: the others may never arrive.
    """
    if not dist.is_initialized():
        return
    destroy_parallel_state()
    forget_meshes()
    if wait:
        dist.barrier()
    dist.destroy_process_group()
    if _hooks_before:
        sys.excepthook = _hooks_before.pop()


@contextmanager
def joined_ranks(timeout_s: float) -> Iterator[Ranks]:
    """The ranks of a job that shares out work without training: bound to their devices, and in one group if several.

    Args:
        timeout_s: Limit on each wait for the other ranks.
    """
    info = resolve_launch(os.environ)
    if info.world_size == 1:
        set_local_device(info.local_rank)
        yield Ranks()
        return
    initialize_distributed(timeout_s)
    try:
        yield Ranks(timeout_s)
    finally:
        shutdown_distributed(wait=False)


def resolve_launch(environment: Mapping[str, str]) -> LaunchInfo:
    """Read torchrun's variables, else those of a Slurm step, else a job of one process.

    Raises:
        MachineError: A variable is missing beside its siblings, is not a number, or is out of range.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        info = _from_torchrun(environment)
    elif int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        info = _from_slurm(environment)
    else:
        info = LaunchInfo(rank=0, local_rank=0, world_size=1)
    if not 0 <= info.rank < info.world_size:
        raise MachineError(f"rank {info.rank} is outside a world of {info.world_size}", key="RANK")
    return info


def gather_hosts() -> list[str]:
    """The name of each rank's host, by rank; every rank calls it."""
    names = [""] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    return names


def first_host(node_list: str) -> str:
    """The first name of Slurm's compressed list: `node[07-09,12],gpu1` → `node07`.

    Raises:
        MachineError: It is no such list.
    """
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", node_list)
    if match is None:
        raise MachineError(f"cannot read the host list {node_list!r}", key="SLURM_STEP_NODELIST")
    prefix, first_number, suffix = match.groups(default="")
    return prefix + first_number + suffix


def _from_torchrun(environment: Mapping[str, str]) -> LaunchInfo:
    rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    # A process on its own needs neither a number on its machine nor an address.
    is_alone = world_size == 1
    return LaunchInfo(
        rank=rank,
        local_rank=_number(environment, "LOCAL_RANK", default=0 if is_alone else None),
        world_size=world_size,
        master_address=environment.get("MASTER_ADDR", "" if is_alone else "localhost"),
        master_port=_number(environment, "MASTER_PORT", default=DEFAULT_MASTER_PORT),
        ranks_here=_number(environment, "LOCAL_WORLD_SIZE", default=0),
    )


def _from_slurm(environment: Mapping[str, str]) -> LaunchInfo:
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "localhost")
    # Jobs that share a node must not share a port.
    own_port = 20000 + _number(environment, "SLURM_JOB_ID", default=0) % 20000
    return LaunchInfo(
        rank=_number(environment, "SLURM_PROCID"),
        local_rank=_number(environment, "SLURM_LOCALID"),
        world_size=_number(environment, "SLURM_STEP_NUM_TASKS"),
        master_address=environment.get("MASTER_ADDR") or first_host(hosts),
        master_port=_number(environment, "MASTER_PORT", default=own_port),
        ranks_here=_ranks_on_this_node(environment),
    )


def _ranks_on_this_node(environment: Mapping[str, str]) -> int:
    """From Slurm's `8(x3),4`: eight tasks on each of the first three nodes, four on the next; 0 when it is not said."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(times or 1)
    node = _number(environment, "SLURM_NODEID", default=0)
    if node < len(counts):
        return counts[node]
    return 0


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not text.isdigit():
        found = f"is {text!r}, not a number" if text else "is not set, though other variables of the launcher are"
        raise MachineError(
            f"{name} {found}",
            where="environment",
            key=name,
            way_out="Start with `mm train --nproc N`, torchrun or srun; unset RANK and WORLD_SIZE for one process.",
        )
    return int(text)


def _join(info: LaunchInfo, timeout: timedelta) -> None:
    options = {"timeout": timeout, "device_id": device_to_bind()}
    try:
        if info.master_address:
            _settle_environment(info)
            dist.init_process_group(_backend(), rank=info.rank, world_size=info.world_size, **options)
        else:
            dist.init_process_group(_backend(), store=dist.HashStore(), rank=0, world_size=1, **options)
    except (RuntimeError, ValueError) as error:  # torch's DistError family, and addresses it cannot read
        raise MachineError(
            f"rank {info.rank} of {info.world_size} could not join the job: {str(error).splitlines()[0]}",
            where=f"{info.master_address}:{info.master_port}" if info.master_address else "",
            way_out="Check that every rank was started, that the address is reachable and the port free.",
        ) from error


def _settle_environment(info: LaunchInfo) -> None:
    """Put what is known under the names by which libraries look for it: torch reads the meeting place there (where it
    also learns of an agent's store), and under Slurm everything else that asks for a rank should find it too."""
    os.environ.update(
        RANK=str(info.rank),
        LOCAL_RANK=str(info.local_rank),
        WORLD_SIZE=str(info.world_size),
        MASTER_ADDR=info.master_address,
        MASTER_PORT=str(info.master_port),
    )
    if not info.spans_hosts:
        return
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(info.ranks_here))
    if GLOO_INTERFACE in os.environ:
        return
    interface = interface_to(info.master_address)
    if interface is None:
        return
    os.environ[GLOO_INTERFACE] = interface.name
    if info.local_rank == 0:
        print(
            f"host {socket.gethostname()}: gloo uses {interface.name} ({interface.address}), the interface "
            f"that reaches {info.master_address}; set {GLOO_INTERFACE} to override",
            file=sys.stderr,
            flush=True,
        )


def _backend() -> str:
    """Beside the accelerator's library there is always gloo, for what lives on the host."""
    device_type = get_device_type()
    if device_type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device_type}:{distributed_backend()}"


ELSEWHERE = "192.0.2.1"
"""An address of the range that is kept for documentation: whatever leads there leads out of this host."""
_SIOCGIFADDR = 0x8915
"""Linux: asks for the IPv4 address of an interface."""


@dataclass(frozen=True)
class Interface:
    """An interface of this host and the address that others see it by."""

    name: str
    address: str


def interface_to(host: str) -> Interface | None:
    """The interface that leads to `host`, a name or an address; for this host itself the one that bears the address.

    A name that means the loopback here (this host's own, on many machines) says nothing of the way to others: the
    interface that leads out of the host is taken then. None when there is no such way, or it cannot be found out.
    """
    for target in (host, ELSEWHERE):
        address = _own_address_towards(target)
        if address is not None and not ipaddress.ip_address(address).is_loopback:
            name = _bearer(address)
            if name:
                return Interface(name, address)
            return None
    return None


def _own_address_towards(host: str) -> str | None:
    """The address that a packet to `host` would bear as its sender; nothing is sent."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        return None


def _bearer(address: str) -> str | None:
    """The interface that has an address."""
    if ":" in address:
        return _bearer_of_ipv6(address)
    try:
        import fcntl  # not on Windows
    except ImportError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asker.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # an interface without an address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _bearer_of_ipv6(address: str) -> str | None:
    wanted = ipaddress.IPv6Address(address).exploded.replace(":", "")
    table = Path("/proc/net/if_inet6")
    if not table.exists():
        return None
    for line in table.read_text().splitlines():
        words = line.split()
        if words[0] == wanted:
            return words[-1]
    return None
