"""What every request passes before anything looks at it: host, key, number at a time, size and time of arrival."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mindspeed_mm.tasks.serve.failing import failure_of
from mindspeed_mm.tasks.serve.limits import Limits, RefusedError
from mindspeed_mm.tasks.serve.metrics import Metrics

OPEN_PATHS = frozenset({"/", "/health"})
"""Anybody may ask these: they tell nothing about the model or its users."""
_MIB = 2**20


class Guard:
    """An ASGI application around another.

    Args:
        app: The other.
        limits: How many, how large and how slow.
        key: Asked for as `Authorization: Bearer KEY`; None: nobody is asked.
        hosts: Names that a request may call this server by, against pages whose own name leads here; None: any.
        metrics: Where requests are counted.
    """

    def __init__(
        self, app: ASGIApp, limits: Limits, key: str | None, hosts: Collection[str] | None, metrics: Metrics
    ) -> None:
        self._app, self._limits, self._metrics = app, limits, metrics
        self._key = None if key is None else f"Bearer {key}".encode()
        self._hosts = None if hosts is None else frozenset(hosts)
        self.running = 0
        """Requests at the moment."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        begun_s, status = time.monotonic(), [0]
        body = _Body(receive, self._limits)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
            await send(message)

        try:
            await self._answer(scope, body, counted)
        except RefusedError as error:
            await body.throw_away()
            await _refuse(error, status[0], scope, receive, counted)
        except ClientDisconnect:
            status[0] = status[0] or 499
        except Exception as error:  # noqa: BLE001 - the border of a request: the server goes on
            await _refuse(failure_of(error), status[0], scope, receive, counted)
        route = getattr(scope.get("route"), "name", "none")
        self._metrics.count("requests", "Requests by route and answer.", route=route, code=str(status[0]))
        self._metrics.observe("request_seconds", "Time of whole requests.", time.monotonic() - begun_s, route=route)

    async def _answer(self, scope: Scope, body: _Body, send: Send) -> None:
        headers = {name: value for name, value in scope["headers"] if name in _READ}
        self._check_host(headers.get(b"host", b""))
        if scope["path"] not in OPEN_PATHS:
            self._check_key(headers.get(b"authorization", b""))
        if scope["method"] != "POST":
            await self._app(scope, body.receive, send)
            return
        if self.running >= self._limits.max_requests:
            raise self._limits.reached("max_requests", f"{self.running} requests are under way", 429)
        self.running += 1
        try:
            await self._app(scope, _replay(await body.whole(), body.receive), send)
        finally:
            self.running -= 1

    def _check_host(self, host: bytes) -> None:
        name = host.decode("latin-1")
        if not name.endswith("]"):  # an IPv6 address without a port
            name = name.rsplit(":", 1)[0]
        if self._hosts is not None and name.strip("[]").lower() not in self._hosts:
            raise RefusedError(403, "this server is not known by that name.", param="--host", code="unknown_host")

    def _check_key(self, given: bytes) -> None:
        if self._key is not None and not hmac.compare_digest(given, self._key):
            raise RefusedError(401, "the key is missing or wrong.", code="invalid_api_key")


class _Body:
    """A request's body as it arrives. Its size is counted, for a client may declare none, or another."""

    def __init__(self, receive: Receive, limits: Limits) -> None:
        self.receive, self._limits = receive, limits
        self._size, self._has_ended = 0, False

    async def whole(self) -> bytes:
        """All of it.

        Raises:
            RefusedError: It is too large, or too slow.
        """
        most, blocks = int(self._limits.max_body_mib * _MIB), []
        try:
            async with asyncio.timeout(self._limits.max_body_seconds):
                while not self._has_ended:
                    blocks.append(await self._block())
                    if self._size > most:
                        raise self._limits.reached("max_body_mib", f"the request has over {most:,} bytes", 413)
        except TimeoutError:
            self._has_ended = True  # nothing more is waited for
            raise self._limits.reached("max_body_seconds", "the request did not arrive in time", 408) from None
        return b"".join(blocks)

    async def throw_away(self) -> None:
        """Read on, within limits: a client that is still sending would not see the answer."""
        most = self._size + _MOST_THROWN * int(self._limits.max_body_mib * _MIB)
        with suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(self._limits.max_body_seconds):
                while not self._has_ended and self._size < most:
                    await self._block()

    async def _block(self) -> bytes:
        message = await self.receive()
        if message["type"] == "http.disconnect":
            self._has_ended = True
            raise ClientDisconnect
        block: bytes = message.get("body", b"")
        self._size += len(block)
        self._has_ended = not message.get("more_body")
        return block


_MOST_THROWN = 8
"""Times the largest request: so much of a refused one is read on."""
_READ = (b"host", b"authorization")


def _replay(body: bytes, receive: Receive) -> Receive:
    """What has arrived, and then what happens to the connection."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed


async def _refuse(error: RefusedError, begun: int, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error, unless an answer has begun: a connection that breaks off tells as much."""
    if begun:
        return
    headers: dict[str, Any] = {"Connection": "close"} if error.status in (408, 413) else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 429:
        headers["Retry-After"] = "1"
    await JSONResponse(error.body(), error.status, headers)(scope, receive, send)
