"""What every request passes before anything looks at it: host, origin, key, content type, size and time of arrival,
number at a time. Every server of ours is put together as an application behind this guard.

Any web page may send requests to this machine. A browser names the page's origin in all that could make the server
compute, and asks first before it sends JSON: a foreign origin is refused, and so is every other content type.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import re
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mindspeed_mm.core.errors import MachineError, ModelFolderError, UsageError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.sampling.finite import NotFiniteError
from mindspeed_mm.tasks.requests.serve import Access
from mindspeed_mm.tasks.serve.limits import RefusedError, WireLimits
from mindspeed_mm.tasks.serve.metrics import Metrics

OPEN_PATHS = frozenset({"/", "/health"})
"""Anybody may ask these: they tell nothing about the model or its users."""
_MIB = 2**20


class Guard:
    """An ASGI application around another.

    Args:
        app: The other.
        limits: How many, how large and how slow.
        access: Who may ask. The key comes as `Authorization: Bearer KEY`. Host names are checked because a foreign page
            may resolve its own name to this server.
        metrics: Where requests are counted.
    """

    def __init__(self, app: ASGIApp, limits: WireLimits, access: Access, metrics: Metrics) -> None:
        self._app, self._limits, self._metrics, self._access = app, limits, metrics, access
        self._key = None if access.key is None else f"Bearer {access.key}".encode()
        self._arriving = _Memory(int(limits.max_requests * limits.max_body_mib * _MIB))
        self.running = 0
        """Requests whose bodies have arrived and whose answers have not ended."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check an HTTP request and pass it to the application. Refusals and errors become responses, and each request
        is counted."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        begun_s, status = time.monotonic(), [0]
        body = _Body(receive, self._limits, self._arriving)

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
        finally:
            body.free()
        route = getattr(scope.get("route"), "name", "none")
        self._metrics.count("requests", "Requests by route and answer.", route=route, code=str(status[0]))
        self._metrics.observe("request_seconds", "Time of whole requests.", time.monotonic() - begun_s, route=route)

    async def _answer(self, scope: Scope, body: _Body, send: Send) -> None:
        headers = {name: value for name, value in scope["headers"] if name in _READ}
        self._check_host(headers.get(b"host", b""))
        self._check_origin(headers.get(b"origin"), headers.get(b"host", b""))
        if scope["path"] not in OPEN_PATHS:
            self._check_key(headers.get(b"authorization", b""))
        if asked := parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True):
            name = asked[0][0][:100]
            message = f"'{name}' is not a field of this request: no route takes query parameters."
            raise RefusedError(400, message, param=name, code="unknown_parameter")
        if scope["method"] != "POST":
            await self._app(scope, body.receive, send)
            return
        _check_type(scope["path"], headers.get(b"content-type", b""))
        whole = await body.whole()
        if self.running >= self._limits.max_requests:
            raise self._limits.reached("max_requests", f"{self.running} requests are under way", 429)
        self.running += 1
        try:
            await self._app(scope, _replay(whole, body.receive), send)
        finally:
            self.running -= 1

    def _check_host(self, host: bytes) -> None:
        name = host.decode("latin-1")
        if not name.endswith("]"):  # an IPv6 address without a port
            name = name.rsplit(":", 1)[0]
        hosts = self._access.hosts
        if hosts is not None and name.strip("[]").lower() not in hosts:
            raise RefusedError(403, "this server is not known by that name.", param="--host", code="unknown_host")

    def _check_origin(self, origin: bytes | None, host: bytes) -> None:
        if origin is None:  # no browser, or a page of this server that only reads
            return
        named = origin.decode("latin-1").lower()
        if named in self._access.origins or named.partition("://")[2] == host.decode("latin-1").lower() != "":
            return
        message = f"pages of '{named[:100]}' may not use this server."
        raise RefusedError(403, message, param="--allow-origin", code="foreign_origin")

    def _check_key(self, given: bytes) -> None:
        if self._key is not None and not hmac.compare_digest(given, self._key):
            raise RefusedError(401, "the key is missing or wrong.", code="invalid_api_key")


class _Body:
    """A request's body as it arrives. Its size is counted, for a client may declare none, or another."""

    def __init__(self, receive: Receive, limits: WireLimits, memory: _Memory) -> None:
        self.receive, self._limits, self._memory = receive, limits, memory
        self._size, self._has_ended, self._held = 0, False, 0

    async def whole(self) -> bytes:
        """All of it.

        Raises:
            RefusedError: It is too large or too slow, or there is no memory for it.
        """
        most, blocks = int(self._limits.max_body_mib * _MIB), []
        try:
            async with asyncio.timeout(self._limits.max_body_seconds):
                while not self._has_ended:
                    blocks.append(await self._block())
                    if self._size > most:
                        raise self._limits.reached("max_body_mib", f"the request has over {most:,} bytes", 413)
                    self._hold(max(0, self._size - _SMALL_BYTES))
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

    def _hold(self, size: int) -> None:
        self._memory.held += size - self._held
        self._held = size
        if size and self._memory.held > self._memory.most:
            raise self._limits.reached("max_requests", "the bodies of other requests fill the memory for them", 429)

    def free(self) -> None:
        """Release the memory that is reserved for the body; called when the request is over."""
        self._hold(0)

    async def _block(self) -> bytes:
        message = await self.receive()
        if message["type"] == "http.disconnect":
            self._has_ended = True
            raise ClientDisconnect
        block: bytes = message.get("body", b"")
        self._size += len(block)
        self._has_ended = not message.get("more_body")
        return block


@dataclass
class _Memory:
    """Of all bodies that are larger than `_SMALL_BYTES`, beyond these."""

    most: int
    held: int = 0


_SMALL_BYTES = _MIB
"""Bodies up to this find room whatever others send: there are no more of them than connections."""
_MOST_THROWN = 8
"""Times the largest request: so much of a refused one is read on."""
_READ = (b"host", b"authorization", b"origin", b"content-type")
_FORM, _JSON = "multipart/form-data", "application/json"
_FORM_PATHS = frozenset({"/v1/audio/transcriptions"})


def _check_type(path: str, given: bytes) -> None:
    """Raise `RefusedError` for a body of another type than the route reads: a page may send others unasked."""
    needed = _FORM if path in _FORM_PATHS else _JSON
    found = given.decode("latin-1").partition(";")[0].strip().lower()
    if found != needed:
        what = f"'{found[:60]}'" if found else "nothing"
        message = f"the request is not {needed}: its Content-Type is {what}."
        raise RefusedError(415, message, param="Content-Type", code="invalid_content_type")


def _replay(body: bytes, receive: Receive) -> Receive:
    """What has arrived, and then what happens to the connection."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        if waiting:
            return waiting.pop()
        return await receive()

    return replayed


async def _refuse(error: RefusedError, begun: int, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with an error, unless an answer has begun: a connection that breaks off tells as much."""
    if begun:
        return
    headers: JsonObject = {"Connection": "close"} if error.status in (408, 413) else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 429:
        headers["Retry-After"] = "1"
    await JSONResponse(error.body(), error.status, headers)(scope, receive, send)


# --- an application behind the guard ----------------------------------------------------------------------------------


def guarded(app: Starlette, limits: WireLimits, access: Access, metrics: Metrics) -> Guard:
    """An application whose every request passes the guard, which also words all of its errors."""
    app.add_exception_handler(HTTPException, _no_route)  # type: ignore[arg-type]
    return Guard(_without_error_pages(app), limits, access, metrics)


def page_headers(page: str) -> dict[str, str]:
    """Headers of an HTML page that runs the scripts it was written with and no others (CSP level 3, hashes), talks to
    its own server alone, and stands in no other page.

    Args:
        page: The HTML, with its scripts and styles inside.
    """
    hashes = []
    for script in re.findall(r"(?s)<script>(.*?)</script>", page):
        digest = hashlib.sha256(script.encode()).digest()
        hashes.append(f"'sha256-{base64.b64encode(digest).decode()}'")
    return {
        "Content-Security-Policy": f"default-src 'none'; style-src 'unsafe-inline'; script-src {' '.join(hashes)}; "
        "connect-src 'self'; img-src data: blob:; media-src data: blob:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }


def _without_error_pages(app: Starlette) -> ASGIApp:
    """Errors pass to the guard, which says all of them alike."""
    stack = app.build_middleware_stack()
    inner: ASGIApp = getattr(stack, "app", stack)  # inside ServerErrorMiddleware

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = app
        await inner(scope, receive, send)

    return answer


async def _no_route(request: Request, error: HTTPException) -> Response:
    said = {404: f"there is nothing at '{request.url.path[:100]}'.", 405: f"'{request.method}' is not answered here."}
    known = RefusedError(error.status_code, said.get(error.status_code, str(error.detail)), code="not_found")
    return JSONResponse(known.body(), error.status_code, error.headers)


# --- requests that fail -----------------------------------------------------------------------------------------------


def failure_of(error: Exception, param: str | None = None) -> RefusedError:
    """The answer to a request that failed; the reason is printed to stderr.

    Args:
        error: Of the model or of the server itself. An error that is an answer stays what it is.
        param: Field of the request that cannot be answered; None: as the error's key says.
    """
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, UsageError):
        return RefusedError.of(error)
    if isinstance(error, NotFiniteError):
        sys.stderr.write(f"{error}\n")
        what = error.problems[0].what.rstrip(".")
        return RefusedError(500, f"the model failed: {what}.", code="not_finite")
    if isinstance(error, MachineError | ModelFolderError):
        sys.stderr.write(f"{error}\n")
        return RefusedError.of(error, param)
    traceback.print_exception(error, file=sys.stderr)
    return RefusedError(500, f"the server failed: {type(error).__name__}.", code="internal_error")
