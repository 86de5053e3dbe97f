"""Two hosts on one machine: two network namespaces with a name each and a link between them, which can be cut.

They need no rights but those of a user namespace, which most machines give to anybody; where one does not, the tests
that want them are skipped with what it said. Files and processes are shared, as on hosts with a shared folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

LIMIT_S = 20.0
"""Of what sets the hosts up."""


@dataclass(frozen=True)
class Host:
    """One of the two."""

    name: str
    address: str
    device: str
    """Its end of the link."""
    pid: int
    """Of the process that keeps it alive."""

    def inside(self, *words: str) -> list[str]:
        """A command, as it is run on this host."""
        return ["nsenter", "--preserve-credentials", f"--target={self.pid}", "--user", "--net", "--uts", *words]

    def start(self, *words: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command here, in a session of its own."""
        return subprocess.Popen(
            self.inside(*words),
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def do(self, *words: str) -> None:
        """Run a short command here that must succeed."""
        done = subprocess.run(self.inside(*words), capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


@dataclass(frozen=True)
class TwoHosts:
    """The pair."""

    first: Host
    second: Host

    def __iter__(self) -> Iterator[Host]:
        return iter((self.first, self.second))

    def cut(self) -> None:
        """Pull the cable: packets are lost without a word to either side."""
        self.second.do("ip", "link", "set", "dev", self.second.device, "down")

    def mend(self) -> None:
        """Plug it in again."""
        self.second.do("ip", "link", "set", "dev", self.second.device, "up")

    def start_mm(self, nproc: int, *words: object, port: int, host: Host) -> subprocess.Popen[str]:
        """`mm WORDS --nproc N` on one of them, told by the variables that launch files set."""
        env = {
            "NNODES": "2",
            "NODE_RANK": str(tuple(self).index(host)),
            "MASTER_ADDR": self.first.address,
            "MASTER_PORT": str(port),
        }
        command = [sys.executable, "-m", "mindspeed_mm", *map(str, words), "--nproc", str(nproc)]
        return host.start(*command, env=env)


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Both hosts, linked; skips the test where the machine cannot make them."""
    with ExitStack() as stack:
        try:
            hosts = _make(stack)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield hosts


def _make(stack: ExitStack) -> TwoHosts:
    keeper = ["sleep", "infinity"]
    first = _keep(stack, ["unshare", "--user", "--map-root-user", "--net", "--uts", *keeper])
    enter_first = ["nsenter", "--preserve-credentials", f"--target={first}", "--user", "--net"]
    # In the user namespace of the first one: whoever may set up a link must own both of its ends.
    second = _keep(stack, [*enter_first, "unshare", "--net", "--uts", *keeper])
    hosts = TwoHosts(Host("host-a", "10.77.0.1", "wire0", first), Host("host-b", "10.77.0.2", "wire1", second))
    wire = ("type", "veth", "peer", "name", hosts.second.device, "netns", str(second))
    hosts.first.do("ip", "link", "add", "name", hosts.first.device, *wire)
    for host in hosts:
        host.do("hostname", host.name)
        host.do("ip", "address", "add", f"{host.address}/24", "dev", host.device)
        host.do("ip", "link", "set", "dev", "lo", "up")
        host.do("ip", "link", "set", "dev", host.device, "up")
    return hosts


def _keep(stack: ExitStack, command: Sequence[str]) -> int:
    """Start what keeps a namespace alive and wait until it is in it; returns its process id."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    stack.callback(_end, process)
    deadline = time.monotonic() + LIMIT_S
    while _program(process.pid) != "sleep":
        if process.poll() is not None:
            raise OSError((process.stderr.read() if process.stderr else "").strip())
        if time.monotonic() > deadline:
            raise OSError(f"{command[0]} does not come up")
        time.sleep(0.01)
    return process.pid


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
