"""Waiting for an answer, no longer than the client does, and no longer than is allowed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from mindspeed_mm.tasks.serve.limits import Limits

Result = TypeVar("Result")


@asynccontextmanager
async def within_limit(limits: Limits) -> AsyncIterator[None]:
    """What takes longer than a request may is refused."""
    try:
        async with asyncio.timeout(limits.max_seconds):
            yield
    except TimeoutError:
        raise limits.reached("max_seconds", "the answer was not ready in time", 408) from None


async def result_of(future: Future[Result], request: Request, give_up: Callable[[], None]) -> Result:
    """What a future brings.

    Args:
        future: Cancelled when nobody waits for it any more.
        request: Of the client.
        give_up: Called then too, for work that has begun.

    Raises:
        ClientDisconnect: The client is gone.
        RefusedError: The server is ending.
    """
    # Starlette says that a client is gone only to whoever receives
    gone = asyncio.ensure_future(_until_gone(request))
    wanted = asyncio.wrap_future(future)
    try:
        await asyncio.wait((wanted, gone), return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            raise ClientDisconnect
        return wanted.result()
    finally:
        gone.cancel()
        if not future.done():
            give_up()
            future.cancel()
        if not wanted.done():
            wanted.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await wanted  # its error has been told, or nobody waits for it


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
