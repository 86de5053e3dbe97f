"""How a server of ours listens: its socket, and uvicorn with the limits of its connections."""

from __future__ import annotations

import socket
from functools import partial
from typing import Any, cast

import uvicorn

from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.tasks.serve.connections import BoundedProtocol, Connections
from mindspeed_mm.tasks.serve.guard import Guard
from mindspeed_mm.tasks.serve.limits import WireLimits

_LONGEST_HEADERS_BYTES = 2**16


def build_server(app: Guard, limits: WireLimits) -> uvicorn.Server:
    """What listens; told to end, it answers what runs first."""
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=_LONGEST_HEADERS_BYTES,
        timeout_graceful_shutdown=max(1, round(limits.max_seconds)),
        http=cast(Any, partial(BoundedProtocol, connections=Connections(limits))),
        loop="asyncio",
        ws="none",
    )
    return uvicorn.Server(config)


def listen(host: str, port: int) -> socket.socket:
    """A socket at an address, before a model is loaded for it.

    Raises:
        MachineError: The address is taken, or is none of this machine's.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        way_out = "Give another --port, or 0 for one that is free."
        raise MachineError(f"{host}:{port} cannot be listened at: {error.strerror}", way_out=way_out) from error
    listening.set_inheritable(True)
    return listening


def shown_host(host: str) -> str:
    """An address as it stands in a URL: one of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host
