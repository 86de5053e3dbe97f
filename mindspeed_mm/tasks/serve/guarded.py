"""An application behind the guard, and the headers of its own page: every server of ours is put together so."""

from __future__ import annotations

import base64
import hashlib
import re

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mindspeed_mm.tasks.requests.access import Access
from mindspeed_mm.tasks.serve.guard import Guard
from mindspeed_mm.tasks.serve.limits import RefusedError, WireLimits
from mindspeed_mm.tasks.serve.metrics import Metrics


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
