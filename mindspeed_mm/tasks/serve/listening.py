"""How a server of ours listens: its socket, and uvicorn with the limits of its connections."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
from collections import defaultdict
from functools import partial
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.tasks.serve.guard import Guard
from mindspeed_mm.tasks.serve.limits import RefusedError, WireLimits

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
    if ":" in host:
        return f"[{host}]"
    return host


# --- connections ------------------------------------------------------------------------------------------------------
# Connections of the server: how many an address may have, and how long one may take to send a request.
# uvicorn waits for the head of a request without a limit, and refuses whole requests once enough connections are
# open. Here a head has a time limit. If there are too many connections, the one that has waited longest for the rest
# of a request is closed, so half-sent requests keep no client out.

SPARE_CONNECTIONS = 256
"""Connections beyond those whose requests are worked on: of pages, of health checks, and of those that are refused."""
_AFTER_S = 5.0
"""An answer that is complete has this long to be read, beyond the limits of the request."""
_PHRASES = {408: "Request Timeout", 429: "Too Many Requests"}
_OF_SITE = 64
"""Bits of an IPv6 address that its owner does not choose."""


class Connections:
    """All connections of a server, oldest first.

    Args:
        limits: Of the server.
    """

    def __init__(self, limits: WireLimits) -> None:
        self.limits = limits
        self._of: dict[str, dict[BoundedProtocol, None]] = defaultdict(dict)

    def enter(self, new: BoundedProtocol) -> bool:
        """Take a connection in; False where there is no room, as all others have whole requests."""
        own = self._of[new.address]
        if len(own) >= self.limits.max_connections_per_address and not self._make_room(own):
            return False
        most = self.limits.max_requests + SPARE_CONNECTIONS
        if sum(map(len, self._of.values())) >= most:
            busiest = max(self._of.values(), key=len)
            if not self._make_room(busiest):
                return False
        own[new] = None
        return True

    def leave(self, gone: BoundedProtocol) -> None:
        """Remove a connection from those of its address, which makes room for another; unknown ones are ignored."""
        own = self._of.get(gone.address, {})
        own.pop(gone, None)
        if not own:
            self._of.pop(gone.address, None)

    def _make_room(self, connections: dict[BoundedProtocol, None]) -> bool:
        for each in connections:
            if each.is_waiting:
                self.leave(each)
                each.refuse(self.limits.reached("max_connections_per_address", "too many connections are open", 429))
                return True
        return False


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol with limits on time and number.

    Args:
        connections: All of the server.
        uvicorns: What uvicorn makes a protocol with.
    """

    def __init__(self, *, connections: Connections, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._connections, self._limits = connections, connections.limits
        self._head_timer: asyncio.TimerHandle | None = None
        self._request_timer: asyncio.TimerHandle | None = None
        self.address = ""

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for a request, or for the rest of one."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        super().connection_made(transport)
        self.address = _site(self.client[0]) if self.client else ""
        if self._connections.enter(self):
            self._head_timer = self.loop.call_later(self._limits.max_head_seconds, self._head_is_late)
        else:
            what = f"{self.address} has too many connections"
            self.refuse(self._limits.reached("max_connections_per_address", what, 429))

    def connection_lost(self, exc: Exception | None) -> None:
        """Give up the connection's place and cancel its timers, then let uvicorn end it."""
        self._connections.leave(self)
        for timer in (self._head_timer, self._request_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, unless the connection is given up."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        """The next request may come; who does not read is not waited for."""
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_later()
        else:
            self._watch_head()

    def timeout_keep_alive_handler(self) -> None:
        """Close a kept-alive connection that sends no further request, and abort it `_AFTER_S` seconds later."""
        super().timeout_keep_alive_handler()
        self._abort_later()

    def refuse(self, error: RefusedError) -> None:
        """Close the connection, with an error where a request has begun and nothing is answered yet."""
        is_idle = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0] and self.cycle is not None
        if not is_idle and (self.cycle is None or not self.cycle.response_started or self.cycle.response_complete):
            body = json.dumps(error.body()).encode()
            head = f"HTTP/1.1 {error.status} {_PHRASES[error.status]}\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()
        self._abort_later()

    def _watch_head(self) -> None:
        """A head has begun, or has ended, with what has come."""
        has_begun = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if has_begun and self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.max_head_seconds, self._head_is_late)
        elif not has_begun and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if self.conn.their_state is not h11.IDLE and self._request_timer is None:
            longest_s = self._limits.max_body_seconds + self._limits.max_seconds + _AFTER_S
            self._request_timer = self.loop.call_later(longest_s, self.transport.abort)

    def _head_is_late(self) -> None:
        self.refuse(self._limits.reached("max_head_seconds", "the head of the request did not arrive in time", 408))

    def _abort_later(self) -> None:
        self.loop.call_later(_AFTER_S, self.transport.abort)


def _site(address: str) -> str:
    """What one client may have many of: an IPv4 address, or the network of an IPv6 address."""
    try:
        known = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(known, ipaddress.IPv4Address) or known.is_loopback:
        return str(known)
    if known.ipv4_mapped is not None:
        return str(known.ipv4_mapped)
    return str(ipaddress.ip_network((known, _OF_SITE), strict=False))
