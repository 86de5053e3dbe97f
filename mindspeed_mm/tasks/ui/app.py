"""The routes of the board, behind the guard of `mm serve`."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from anyio import to_thread
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.core.os_errors import explained_os_error
from mindspeed_mm.core.version import __version__
from mindspeed_mm.tasks.report.page import page_environment
from mindspeed_mm.tasks.requests.access import Access
from mindspeed_mm.tasks.requests.ui import UiRequest
from mindspeed_mm.tasks.serve.guard import Guard
from mindspeed_mm.tasks.serve.guarded import guarded, page_headers
from mindspeed_mm.tasks.serve.limits import RefusedError
from mindspeed_mm.tasks.serve.metrics import Metrics
from mindspeed_mm.tasks.ui import configs, form
from mindspeed_mm.tasks.ui.files import inside
from mindspeed_mm.tasks.ui.jobs import Jobs, check_whole, look
from mindspeed_mm.tasks.ui.listing import Board
from mindspeed_mm.tasks.ui.showing import Showing

TEMPLATE = "ui/board.html.j2"
_SCRIPTS = ("board.js", "making.js")
_MOST_ROWS, _MOST_RANKS = 50, 1024

Record = dict[str, Any]
Result = TypeVar("Result")
Answer = Callable[[Request], Awaitable[Response]]


def build_app(request: UiRequest, access: Access, jobs: Jobs) -> Guard:
    """The board as an ASGI application.

    Args:
        request: What is shown.
        access: Who may look.
        jobs: The processes that are started from it.
    """
    board = Board(request.folder)
    also = [folder.resolve() for folder in request.also]
    looking = LookingRoutes(board, Showing(board.root), jobs, request.read_only)
    routes = looking.routes()
    if not request.read_only:
        routes += MakingRoutes(board, jobs, also).routes()
    return guarded(Starlette(routes=routes), request.limits, access, Metrics())


def board_page() -> str:
    """The page, with its scripts and styles inside: it fetches nothing but what it shows."""
    folder = Path(__file__).parent
    script = "".join((folder / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    return page_environment().get_template(TEMPLATE).render(script=Markup(script), version=__version__)  # our own


class LookingRoutes:
    """What changes nothing: the list of runs, one of them, several beside one another."""

    def __init__(self, board: Board, showing: Showing, jobs: Jobs, read_only: bool) -> None:
        self._board, self._showing, self._jobs, self._read_only = board, showing, jobs, read_only
        self._page = board_page()
        self._headers = page_headers(self._page)

    def routes(self) -> list[Route]:
        """Return the routes for whoever may look."""
        return [
            Route("/", self._show_page, name="page"),
            Route("/health", self._health, name="health"),
            Route("/api/runs", self._runs, name="runs"),
            Route("/api/show", self._show, methods=["POST"], name="show"),
        ]

    async def _show_page(self, _: Request) -> Response:
        return HTMLResponse(self._page, headers=self._headers)

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _runs(self, _: Request) -> Response:
        found = await in_thread(self._board.look)
        return _json(
            {
                "folder": str(self._board.root),
                "read_only": self._read_only,
                "runs": [run.to_dict() for run in found.runs],
                "configs": found.configs,
                "notes": found.notes,
                "jobs": self._jobs.listed(),
            }
        )

    async def _show(self, request: Request) -> Response:
        asked = await body_of(request, runs=list, stamp=str)
        if not all(isinstance(run, str) for run in asked["runs"]):
            raise RefusedError(400, "runs are asked for by their ids.", param="runs", code="invalid_value")
        paths = [run_path(self._board, run) for run in asked["runs"]]
        stamp, html = await in_thread(self._showing.show, paths, asked["stamp"])
        return _json({"stamp": stamp, "html": html})


class MakingRoutes:
    """What makes and checks configurations, shows their rows, and starts and stops runs."""

    def __init__(self, board: Board, jobs: Jobs, also: list[Path]) -> None:
        self._board, self._jobs, self._also = board, jobs, also
        self._root = board.root

    def routes(self) -> list[Route]:
        """Return the routes that a board for reading only does not have."""
        posts: dict[str, Answer] = {
            "configs/read": self._read,
            "configs/of-run": self._read_of_run,
            "configs/compose": self._compose,
            "configs/check": self._check,
            "configs/save": self._save,
            "configs/check-whole": self._check_whole,
            "preview": self._preview,
            "jobs/train": self._train,
            "jobs/serve": self._serve,
            "jobs/stop": self._stop,
        }
        made = [Route(f"/api/{path}", answer, methods=["POST"], name=path) for path, answer in posts.items()]
        return [Route("/api/fields", self._fields, name="fields"), *made]

    async def _fields(self, _: Request) -> Response:
        return _json({"fields": await in_thread(form.fields), "first": len(form.FIRST)})

    async def _read(self, request: Request) -> Response:
        asked = await body_of(request, name=str)
        return _json({"text": await in_thread(configs.read, self._root, asked["name"])})

    async def _read_of_run(self, request: Request) -> Response:
        asked = await body_of(request, run=str)
        return _json({"text": await in_thread(configs.read_of_run, run_path(self._board, asked["run"]))})

    async def _compose(self, request: Request) -> Response:
        asked = await body_of(request, text=str, values=dict)
        values = {str(key): str(value) for key, value in asked["values"].items()}
        return _json({"text": await in_thread(form.compose, asked["text"], values)})

    async def _check(self, request: Request) -> Response:
        asked = await body_of(request, text=str, name=str)
        name = asked["name"] if asked["name"].isprintable() else ""
        return _json({"findings": await in_thread(configs.check_text, asked["text"], name or "the YAML")})

    async def _save(self, request: Request) -> Response:
        asked = await body_of(request, name=str, text=str, replace=bool)
        save = partial(configs.save, replace=asked["replace"])
        path = await in_thread(save, self._root, asked["name"], asked["text"])
        return _json({"name": str(path.relative_to(self._root))})

    async def _check_whole(self, request: Request) -> Response:
        asked = await body_of(request, name=str)
        path = await in_thread(inside, self._root, asked["name"])
        return _json(await in_thread(check_whole, self._root, path))

    async def _preview(self, request: Request) -> Response:
        asked = await body_of(request, name=str, count=int)
        path = await in_thread(inside, self._root, asked["name"])
        count = min(max(asked["count"], 1), _MOST_ROWS)
        return _json({"html": await in_thread(self._preview_page, path, count)})

    def _preview_page(self, path: Path, count: int) -> str:
        configs.check_shows_inside(self._root, path, self._also)
        with TemporaryDirectory(prefix="mm-ui-") as folder:
            page = Path(folder) / "preview.html"
            words = ["data", "preview", str(path), f"--count={count}", f"--html={page}"]
            code, _, told = look(self._root, words)
            if code:
                raise RefusedError(400, told.strip() or f"the preview ended with exit code {code}.", code="preview")
            return page.read_text(encoding="utf-8")

    async def _train(self, request: Request) -> Response:
        asked = await body_of(request, name=str, nproc=int)
        if not 1 <= asked["nproc"] <= _MOST_RANKS:
            raise RefusedError(400, f"a host has 1 to {_MOST_RANKS} ranks.", param="nproc", code="invalid_value")
        path = await in_thread(inside, self._root, asked["name"])
        await in_thread(configs.check_stays_inside, self._root, path)
        job = await in_thread(self._jobs.train, path, asked["name"], asked["nproc"])
        return _json(job.to_dict())

    async def _serve(self, request: Request) -> Response:
        asked = await body_of(request, run=str)
        path = run_path(self._board, asked["run"])
        job = await in_thread(self._jobs.serve, path, str(path.relative_to(self._root)))
        return _json(job.to_dict())

    async def _stop(self, request: Request) -> Response:
        asked = await body_of(request, job=int)
        await in_thread(self._jobs.stop, asked["job"])
        return _json({"jobs": self._jobs.listed()})


def run_path(board: Board, run: str) -> Path:
    """The folder of a run that was listed.

    Raises:
        RefusedError: No run of this id was listed, or it is gone.
    """
    path = board.path_of(run)
    if path is None or path.is_symlink() or not path.resolve().is_relative_to(board.root):
        raise RefusedError(404, "this run is not there any more.", param="run", code="run_not_found")
    return path


async def in_thread(do: Callable[..., Result], *given: Any) -> Result:
    """Do something with files away from the event loop.

    Raises:
        RefusedError: What a person can act on, with the way out.
    """
    try:
        return await to_thread.run_sync(do, *given)
    except MMError as error:
        raise RefusedError(400, str(error), param=error.problems[0].key or None, code="invalid_value") from error
    except OSError as error:
        known = explained_os_error(error)
        if known is None:
            raise
        raise RefusedError(409, str(known), code="files") from error


async def body_of(request: Request, **kinds: type) -> Record:
    """The fields of a request.

    Raises:
        RefusedError: It is no JSON object with these fields of these kinds, and no others.
    """
    try:
        given = parse_json(await request.body(), finite=True)
    except ValueError as error:
        raise RefusedError(400, f"the request is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(given, dict) or given.keys() != kinds.keys():
        raise RefusedError(400, f"the request has the fields {', '.join(kinds)}.", code="invalid_fields")
    for name, kind in kinds.items():
        if type(given[name]) is not kind:
            raise RefusedError(400, f"'{name}' has another type.", param=name, code="invalid_value")
    return given


def _json(content: Record) -> Response:
    """A JSON answer; half characters of file names are escapes in it."""
    return Response(json.dumps(content, default=str), media_type="application/json")
