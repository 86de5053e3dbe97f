"""Connections of one request, all of whose waiting ends at one deadline."""

from __future__ import annotations

import functools
import socket
import ssl
import time
from collections.abc import Iterable
from typing import Any

import httpcore2
from typing_extensions import override

_WRITTEN_AT_ONCE = 1 << 14


@functools.cache
def trusted_certificates() -> ssl.SSLContext:
    """The certificates that this machine trusts, or those of `SSL_CERT_FILE`; reading them takes a while."""
    return httpcore2.default_ssl_context()


class RequestClock:
    """What is left of a request's time.

    Args:
        total_s: From now to the last byte received.
        silence_s: Longest wait for the next bytes; None: only `total_s` counts.
    """

    def __init__(self, total_s: float, silence_s: float | None) -> None:
        self._end_s, self._silence_s = time.monotonic() + total_s, silence_s

    def left_s(self) -> float:
        """Seconds for the next thing that waits. Raises `httpcore2.ReadTimeout` when none are left."""
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise httpcore2.ReadTimeout
        if self._silence_s is None:
            return left_s
        return min(left_s, self._silence_s)


class _TimedStream(httpcore2.NetworkStream):
    """A connection whose reads and writes all end at one deadline; the timeouts of libraries hold for single reads."""

    def __init__(self, inner: httpcore2.NetworkStream, clock: RequestClock) -> None:
        self._inner, self._clock = inner, clock

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, self._clock.left_s())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        # in pieces: one long write to a server that reads slowly would outlive the deadline
        for start in range(0, len(buffer), _WRITTEN_AT_ONCE):
            self._inner.write(buffer[start : start + _WRITTEN_AT_ONCE], self._clock.left_s())

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.NetworkStream:
        return _TimedStream(self._inner.start_tls(ssl_context, server_hostname, self._clock.left_s()), self._clock)

    def get_extra_info(self, info: str) -> object:
        return self._inner.get_extra_info(info)


class TimedBackend(httpcore2.NetworkBackend):
    """Makes such connections to the addresses of a host one after the other, within the same deadline."""

    def __init__(self, clock: RequestClock) -> None:
        self._clock = clock

    @override
    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.NetworkStream:
        """Connect to the first address of a host that answers, in what is left of the request's time.

        Args:
            host: Name or address.
            port: Of the host.
            timeout: Not used: the request's clock says how long.
            local_address: Not used: the system chooses one.
            socket_options: Of the socket, as httpcore passes them.

        Raises:
            httpcore2.ConnectError: The name has no address, or no address answers.
        """
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpcore2.ConnectError(error) from error
        backend, failure = httpcore2.SyncBackend(), httpcore2.ConnectError("its name has no address")
        for entry in found:
            try:
                stream = backend.connect_tcp(str(entry[4][0]), port, self._clock.left_s(), None, socket_options)
                return _TimedStream(stream, self._clock)
            except httpcore2.ConnectError as error:
                failure = error
        raise failure
