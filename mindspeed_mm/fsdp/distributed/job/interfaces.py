"""Which network interface of this host leads to another one.

gloo takes the interface that the host's own name stands for. On many machines that is the loopback (`127.0.1.1 name` in
`/etc/hosts`, a name that cannot be resolved in a container), and ranks of other hosts then knock at their own door.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

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
            return Interface(name, address) if name else None
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
